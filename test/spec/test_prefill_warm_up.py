"""The prompts of a GPU's start leave nothing behind, and fla-core's chunk kernels keep one configuration each."""

from __future__ import annotations

import pytest

from model.tiny_drafter import write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.model_executor import prefill_warm_up
from sgling.srt.model_executor.prefill_warm_up import LENGTHS, read_prompts
from spec.dspark_harness import dspark
from spec.harness import Harness, random_prompt, request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def warmed(harness: Harness, monkeypatch) -> list[int]:
    """Read the prompts of a start; their lengths."""
    worker, lengths = harness.scheduler.worker, []
    prefill = worker.prefill
    monkeypatch.setattr(worker, "prefill", lambda step: (lengths.append(len(step.token_ids)), prefill(step))[1])
    read_prompts(harness.core.runner, worker, harness.core.args.chunked_prefill_size)
    monkeypatch.undo()
    return lengths


@pytest.mark.parametrize("algorithm", ["none", "NEXTN", "DSPARK"])
def test_warmed_up_and_cold_engines_answer_alike(model_dir, tmp_path, monkeypatch, algorithm):
    def fresh():
        if algorithm == "DSPARK":
            return dspark(model_dir, write_tiny_drafter(tmp_path / "drafter"))
        return Harness(model_dir, speculative_algorithm=algorithm)

    requests = [request("a", random_prompt(13, 1)), request("bb", random_prompt(40, 2), temperature=0.9)]
    expected = {rid: outcome.ids for rid, outcome in fresh().run(*requests).items()}
    harness = fresh()
    assert warmed(harness, monkeypatch) == sorted(LENGTHS)
    runner = harness.core.runner
    assert not runner.future.new_seq_lens.any() and not runner.pools.state.temporal.any()
    assert {rid: outcome.ids for rid, outcome in harness.run(*requests).items()} == expected


def test_no_prompt_is_longer_than_a_chunk_or_the_context(model_dir, monkeypatch):
    assert warmed(Harness(model_dir, chunked_prefill_size=64), monkeypatch) == [5, 64]
    whole = Harness(model_dir, chunked_prefill_size=-1, context_length=300)
    assert warmed(whole, monkeypatch) == [5, 100, 209, 299]


def test_a_cpu_has_nothing_to_warm_up(model_dir):
    harness = Harness(model_dir)
    assert harness.scheduler.prefill_warm_up_s == 0
    assert prefill_warm_up.warm_up_prefill(harness.core.runner, harness.scheduler.worker, 64) == 0
