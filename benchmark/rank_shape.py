"""One GPU that does what one tensor-parallel rank does: the published model with every sharded dimension divided.

No communication. Weights follow the rule of ``--load-format dummy`` (norms 1, linears +-sqrt(3 / fan_in), own seed per
tensor), which keeps routing close to uniform. The context is synthetic: random KV rows, states and conv windows.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import torch

from sgling.srt.config.draft_model import BUNDLED_DIR, complete_args
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.step import StepInput
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling_kernel.sampling import SamplingFlags

CONFIG = Path(__file__).parent / "configs" / "ling3-flash.json"
DRAFTER_CONFIG = Path(__file__).parent / "configs" / "ling3-flash-dspark.json"
SHARDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "vocab_size",
)
MAX_WIDTH, RING = 17, 64  # the widest row of the table; NEXTN flags stop at 8
ROW = 1  # the one request row
SPARE = 4096  # positions behind the context for the measured rounds


def rank_config(tp_shape: int, layers: int | None) -> dict:
    """config.json of one rank; ``layers`` cuts the model for smoke runs."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    for key in SHARDED:
        config[key] //= tp_shape
    config["eos_token_id"] = config["pad_token_id"] = 0
    if layers is not None:
        for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            config[key] = config[key][-layers:]
        config["num_hidden_layers"] = layers
    return config


def rank_drafter(target: dict, tp_shape: int, block: int) -> dict:
    """config.json of one rank of the published drafter with another block size, on a target of :func:`rank_config`."""
    config = json.loads(DRAFTER_CONFIG.read_text(encoding="utf-8"))
    for key in SHARDED:
        if key in config:
            config[key] //= tp_shape
    layers = target["num_hidden_layers"]
    if layers <= config["target_layer_ids"][-1] + 1:  # a model cut for smoke runs
        config["target_layer_ids"] = list(range(max(1, layers - 6), layers - 1))
    return config | {"num_target_layers": layers, "block_size": block, "mask_token_id": config["vocab_size"] - 1}


def build_runner(config: dict, context: int, device: str, drafter: dict | None = None) -> ModelRunner:
    """Weights and pools for one request of ``context`` tokens; with a ``drafter`` (its config) DSPARK, else NEXTN."""
    common = {
        "load_format": "dummy",
        "device": device,
        "context_length": context + SPARE,
        "max_running_requests": 1,
        "max_total_tokens": context + 2 * SPARE,
        "random_seed": 0,
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if drafter is None:
            args = ServerArgs.from_kwargs(
                model_path=directory, speculative_algorithm="NEXTN", speculative_num_steps=5, **common
            )
            spec = dataclasses.replace(args.spec, num_steps=MAX_WIDTH - 1, width=MAX_WIDTH, ring_length=RING)
            args = dataclasses.replace(args, spec=spec)
        else:
            bundled = Path(directory) / BUNDLED_DIR
            bundled.mkdir()
            (bundled / "config.json").write_text(json.dumps(drafter), encoding="utf-8")
            args = complete_args(ServerArgs.from_kwargs(model_path=directory, speculative_algorithm="DSPARK", **common))
        return ModelRunner(args, ModelConfig.from_dir(directory), ParallelState.single())


@torch.inference_mode()
def fill_context(runner: ModelRunner) -> None:
    """Random caches and states; done once."""
    runner.req_to_token.write(ROW, 0, list(range(1, runner.req_to_token.width + 1)))
    for buffer in (runner.pools.kv.buffer, runner.pools.draft_kv.buffer, runner.pools.state.conv):
        buffer.normal_()
    runner.pools.state.temporal.normal_(std=0.05)
    runner.future.hidden_states.normal_()
    runner.future.state_slot[ROW] = 1


@torch.inference_mode()
def set_length(runner: ModelRunner, context: int) -> None:
    """Put the request back to ``context`` committed tokens."""
    runner.future.new_seq_lens[ROW] = context
    runner.future.output_tokens[ROW] = 17
    runner.future.topk_index[ROW] = 23


def greedy_step(runner: ModelRunner, width: int) -> StepInput:
    """The decode step of the one request."""
    rows = torch.full((1,), ROW, dtype=torch.int64, device=runner.device)
    return StepInput(rows, width, runner.req_to_token.width, SamplingFlags(), None)
