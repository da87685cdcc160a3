"""Conformance 11 (docs/dspark.md §8): a round reads no device value, keeps its addresses, and follows its inputs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model.tiny_drafter import MLA, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.draft_model import complete_args
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.step import LogprobRequest, StepInput
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.dspark_worker import DSparkWorker
from sgling.srt.speculative.registry import create_worker
from sgling_kernel.sampling import SamplingFlags
from spec.dspark_harness import dspark, step_of
from spec.harness import random_prompt
from spec.states import advance

EVERYTHING = SamplingFlags(*(True for _ in SamplingFlags._fields))
FORMS = {
    "dense vanilla": {},
    "mla gated": {**MLA, "markov_head_type": "gated"},
    "sliding rnn": {
        "markov_head_type": "rnn",
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 8,
        "rope_is_neox_style": False,
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def worker_of(target, drafter, **kwargs) -> DSparkWorker:
    args = ServerArgs.from_kwargs(
        model_path=str(target),
        speculative_draft_model_path=str(drafter),
        speculative_algorithm="DSPARK",
        load_format="dummy",
        device="cpu",
        max_running_requests=4,
        **kwargs,
    )
    args = complete_args(args)
    runner = ModelRunner(args, ModelConfig.from_dir(target), ParallelState.single())
    runner.sampling.allocate(EVERYTHING)
    return create_worker(args.spec, runner)


@pytest.mark.parametrize("flags", [SamplingFlags(), EVERYTHING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rollback", ["replay", "staged"])
@pytest.mark.parametrize("rejection", [False, True], ids=["verify", "rejection"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [1, 2, 9])
def test_11_a_round_reads_nothing(target, tmp_path, form, width, rejection, rollback, flags):
    drafter = write_tiny_drafter(tmp_path, block_size=8, **FORMS[form])
    with FakeTensorMode():
        worker = worker_of(target, drafter, linear_rollback=rollback, speculative_use_rejection_sampling=rejection)
        step = StepInput(torch.arange(4), width, 512, flags, LogprobRequest(3, (5, 7)))
        worker.draft(step)
        result = worker.verify(step)
        worker.extend(step)
    assert result.tokens.shape == (4, width)
    assert result.logprobs.top_ids.shape == (4 * width, 3)


@pytest.mark.parametrize("rejection", [False, True], ids=["verify", "rejection"])
@pytest.mark.parametrize("rows", [4, 13, 36])
def test_11_a_scheduled_round_reads_nothing(target, tmp_path, monkeypatch, rows, rejection):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    drafter = write_tiny_drafter(tmp_path, block_size=8)
    with FakeTensorMode():
        worker = worker_of(target, drafter, speculative_use_rejection_sampling=rejection)
        result = worker.decode(StepInput(torch.arange(4), 9, 512, EVERYTHING, None, rows))
    assert result.schedule.confidence.shape == (4, 8)
    assert result.schedule.verify_lens.shape == (4,)


def test_11_no_backend_needs_lengths_on_the_host(target, tmp_path):
    worker = worker_of(target, write_tiny_drafter(tmp_path))
    assert worker.runner.needs_cpu_seq_lens is False
    worker.drafter.attn_backend.needs_cpu_seq_lens = True
    assert worker.runner.needs_cpu_seq_lens is True


def addresses(worker: DSparkWorker) -> list[int]:
    runner = worker.runner
    tensors = [*worker.buffers, runner.pools.draft_kv.buffer, runner.pools.kv.buffer, *runner.pools.rollback]
    tensors += [runner.future.new_seq_lens, runner.future.output_tokens, *runner.pools.state.__dict__.values()]
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


@torch.inference_mode()
def test_11_replaying_the_same_step_follows_lengths_tables_and_temperature(target, tmp_path):
    """The very same StepInput object, again and again: all that changes lies in buffers, whose addresses stay."""
    drafter = write_tiny_drafter(tmp_path, block_size=8)
    prompt = random_prompt(21, 4)
    expected = dspark(target, drafter, disable_overlap_schedule=True)
    reference = advance(expected, prompt, 40)
    harness = dspark(target, drafter, disable_overlap_schedule=True)
    req = advance(harness, prompt, 1)
    worker, resources = harness.scheduler.worker, harness.core.resources
    resources.reserve(req, 200)
    step = step_of(harness, req)
    before, ids = addresses(worker), list(req.output_ids)
    while len(ids) < 40:
        result = worker.decode(step)
        ids += result.tokens[0, : int(result.accept_lens)].tolist()
    assert ids[:40] == reference.output_ids[:40]
    tables = harness.core.runner.sampling.tables
    tables.temperature[req.req_pool_idx] = 3.0
    sampled = step._replace(flags=SamplingFlags(sampled=True))
    state = harness.core.runner.future.snapshot_row(req.req_pool_idx)
    worker.draft(sampled)
    warm = worker.buffers.draft_tokens[0].clone()
    tables.temperature[req.req_pool_idx] = 0.0
    worker.draft(sampled)
    cold = worker.buffers.draft_tokens[0].clone()
    worker.draft(step)
    assert torch.equal(worker.buffers.draft_tokens[0], cold) and not torch.equal(warm, cold)
    assert all(map(torch.equal, state, harness.core.runner.future.snapshot_row(req.req_pool_idx)))
    assert addresses(worker) == before
