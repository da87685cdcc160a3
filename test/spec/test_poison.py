"""Unused KV, padding rows, scratch and foreign state slots filled with NaN change nothing."""

from __future__ import annotations

import pytest
import torch

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.core.step import StepInput
from spec.harness import Harness, random_prompt, request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=9)


def poison(harness: Harness) -> None:
    """NaN into everything that no live token owns; request rows and slots are all free at this point."""
    pools, worker = harness.core.runner.pools, harness.scheduler.worker
    floats = [pools.kv.buffer, pools.draft_kv.buffer, pools.state.conv, pools.state.temporal, *pools.rollback]
    floats += [worker.buffers.features, harness.core.runner.future.hidden_states]
    for tensor in floats:
        tensor.fill_(torch.nan)


@pytest.mark.parametrize("rollback", ["replay", "staged"])
@pytest.mark.parametrize("width", [1, 4])
def test_poisoned_memory_changes_no_output(model_dir, rollback, width):
    def fresh():
        return Harness(model_dir, speculative_num_steps=width - 1, linear_rollback=rollback)

    requests = [request("a", random_prompt(13, 1)), request("bb", random_prompt(40, 2), temperature=0.9)]
    clean = fresh().run(*requests)
    harness = fresh()
    poison(harness)
    poisoned = harness.run(*requests)
    assert {rid: o.ids for rid, o in poisoned.items()} == {rid: o.ids for rid, o in clean.items()}


@pytest.mark.parametrize("rollback", ["replay", "staged"])
def test_padded_rows_change_no_real_row(model_dir, rollback):
    """Every launched step gets three padded rows whose dummies hold NaN, as a captured graph of a larger bucket has."""
    requests = [request("a", random_prompt(13, 1)), request("bb", random_prompt(40, 2))]
    clean = Harness(model_dir, linear_rollback=rollback).run(*requests)
    harness = Harness(model_dir, linear_rollback=rollback)
    poison(harness)
    worker = harness.scheduler.worker
    decode = worker.decode

    def padded(step: StepInput):
        rows = torch.cat((step.req_pool_indices, torch.zeros(3, dtype=torch.int64)))
        result = decode(step._replace(req_pool_indices=rows))
        real = len(step.req_pool_indices)
        assert (result.accept_lens[real:] == 0).all()
        return result._replace(tokens=result.tokens[:real], accept_lens=result.accept_lens[:real])

    worker.decode = padded
    padded_outcome = harness.run(*requests)
    assert {rid: o.ids for rid, o in padded_outcome.items()} == {rid: o.ids for rid, o in clean.items()}
    assert (harness.core.runner.future.new_seq_lens[0] == 0).all()


def test_relay_rows_of_a_finished_request_never_reach_its_successor(model_dir):
    harness = Harness(model_dir, max_running_requests=1)
    first = harness.run(request("a", random_prompt(30, 3), temperature=1.0, frequency_penalty=1.0, logit_bias={4: 5.0}))
    second = harness.run(request("bb", random_prompt(9, 4)))
    alone = Harness(model_dir).run(request("bb", random_prompt(9, 4)))
    assert first["a"].reason.type == "length"
    assert second["bb"].ids == alone["bb"].ids
