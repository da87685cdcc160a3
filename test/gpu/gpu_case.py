"""Models, requests and runs of the GPU suites: two random models, dummy weights, the real scheduler in this thread."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path

import torch

from model.published import FLASH, PICO
from spec.harness import Harness, Oracle, random_drafter, random_prompt, request

SLICE_LAYERS = 12
RANK_SLICE = {  # what one of four ranks holds of the published model, cut to twelve layers and 64 experts
    **FLASH,
    "num_hidden_layers": SLICE_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 64,
    "moe_intermediate_size": 192,
    "moe_shared_expert_intermediate_size": 192,
    "intermediate_size": 1536,
    "vocab_size": 8192,
    "expert_swiglu_limit_list": FLASH["expert_swiglu_limit_list"][-SLICE_LAYERS:],
    "share_expert_swiglu_limit_list": FLASH["share_expert_swiglu_limit_list"][-SLICE_LAYERS:],
    "eos_token_id": 0,
    "pad_token_id": 1,
}
MODELS = {"pico": PICO, "slice": RANK_SLICE}
NEW_TOKENS = 40
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}


def write_config(directory: Path, name: str) -> Path:
    """A model directory with config.json only (dummy weights)."""
    path = directory / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    return path


def requests(count: int, new_tokens: int = NEW_TOKENS) -> list:
    """Greedy and seeded requests in turn, prompts of different lengths."""
    return [
        request(f"r{i}", random_prompt(7 + 30 * i, i), max_new_tokens=new_tokens, **(SAMPLED if i % 2 else {}))
        for i in range(count)
    ]


def build(path: Path, **kwargs) -> Harness:
    """A harness on the GPU; ``width`` sets any verify width, 0 = no speculation."""
    width = kwargs.pop("width")
    if width == 0:
        kwargs["speculative_algorithm"] = "none"
    else:
        ring = 1 << (2 * width - 1).bit_length()
        kwargs["spec"] = {"num_steps": width - 1, "width": width, "ring_length": max(16, ring)}
    defaults = {"device": "cuda", "load_format": "dummy", "cuda_graph_bs_decode": [1, 4], "max_running_requests": 4}
    return Harness(path, **{**defaults, "context_length": 1024, "max_total_tokens": 8192, **kwargs})


def run(path: Path, batched: bool = False, drafter=None, count: int = 4, **kwargs) -> dict[str, list[int]]:
    """Output ids by request; alone, one after another, unless ``batched``."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    harness = build(path, **kwargs)
    if drafter is not None:
        harness.use_drafter(drafter(harness) if callable(drafter) else drafter)
    if batched:
        harness.run(*requests(count))
    else:
        for one in requests(count):
            harness.run(one)
    return {rid: outcome.ids for rid, outcome in harness.outcomes.items()}


def random_drafts(path: Path):
    """Drafter without knowledge."""
    return lambda harness: random_drafter(MODELS[path.name]["vocab_size"])


def oracle(path: Path, truth: dict[str, list[int]], seen: Counter, always_wrong: bool = False):
    """Drafter that knows the answer and plants errors; ``seen`` counts the accept lengths that came out."""
    known = {f"r{i}": (7 + 30 * i, truth[f"r{i}"]) for i in range(len(truth))}

    def make(harness: Harness) -> Oracle:
        count = harness.core.results._count

        def counted(req, accepted, width) -> None:
            seen[accepted] += 1
            count(req, accepted, width)

        harness.core.results._count = counted
        return Oracle(harness, known, MODELS[path.name]["vocab_size"], always_wrong)

    return make
