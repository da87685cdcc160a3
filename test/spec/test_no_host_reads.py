"""No blocking read: draft, verify, extend, decode and their variants run under FakeTensorMode, where a read raises."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.step import LogprobRequest, StepInput
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.registry import create_worker
from sgling_kernel.sampling import SamplingFlags

EVERYTHING = SamplingFlags(*(True for _ in SamplingFlags._fields))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def fake_worker(model_dir, **kwargs):
    args = ServerArgs.from_kwargs(
        model_path=str(model_dir), load_format="dummy", device="cpu", max_running_requests=4, **kwargs
    )
    runner = ModelRunner(args, ModelConfig.from_dir(model_dir), ParallelState.single())
    runner.sampling.allocate(EVERYTHING)
    return create_worker(args.spec, runner)


def step_of(worker, width: int, flags=EVERYTHING, logprobs=None) -> StepInput:
    return StepInput(torch.arange(4), width, 512, flags, logprobs)


@pytest.mark.parametrize("flags", [SamplingFlags(), EVERYTHING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rollback", ["replay", "staged"])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_round_reads_nothing(model_dir, width, rollback, flags):
    with FakeTensorMode():
        worker = fake_worker(
            model_dir,
            speculative_algorithm="NEXTN",
            speculative_num_steps=width - 1,
            linear_rollback=rollback,
        )
        step = step_of(worker, width, flags, LogprobRequest(3, (5, 7)))
        worker.draft(step)
        result = worker.verify(step)
        worker.extend(step)
    assert result.tokens.shape == (4, width)
    assert result.accept_lens.shape == (4,)
    assert result.logprobs.top_ids.shape == (4 * width, 3)


def test_plain_decode_reads_nothing(model_dir):
    with FakeTensorMode():
        worker = fake_worker(model_dir, speculative_algorithm="none")
        assert worker.decode(step_of(worker, 1)).tokens.shape == (4, 1)


@pytest.mark.parametrize("metadata", ["in_graph", "glue", "eager"])
def test_no_metadata_mode_reads_anything(model_dir, metadata):
    with FakeTensorMode():
        worker = fake_worker(
            model_dir, speculative_algorithm="NEXTN", speculative_num_steps=3, cuda_graph_metadata=metadata
        )
        assert worker.decode(step_of(worker, 4)).tokens.shape == (4, 4)


def test_the_instrument_works(model_dir):
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.ones(1).item()


def test_default_backends_do_not_need_lengths_on_the_host(model_dir):
    worker = fake_worker(model_dir, speculative_algorithm="NEXTN")
    assert worker.runner.needs_cpu_seq_lens is False


def test_one_backend_that_needs_lengths_pins_the_engine(model_dir, monkeypatch):
    worker = fake_worker(model_dir, speculative_algorithm="NEXTN")
    monkeypatch.setattr(type(worker.runner.draft_model.attn_backend), "needs_cpu_seq_lens", True)
    assert worker.runner.needs_cpu_seq_lens is True
