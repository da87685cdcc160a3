"""Conformance 6 and 12 (docs/dspark.md §8) and state parity at every block size: what a commit leaves behind."""

from __future__ import annotations

import pytest
import torch

from model.driver import Driver, load, prompt_ids
from model.tiny_drafter import MLA, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from spec.dspark_harness import BLOCK_SIZES, VOCAB, InjectedFeatures, dspark, use_drafts
from spec.harness import Harness, Oracle, random_prompt, request
from spec.states import EXACT, advance, plain_states, rounds_equal_to_plain

PROMPT = random_prompt(19, 1)
STEPS = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2)


@pytest.fixture(scope="module")
def loaded(target):
    return load(target)


@pytest.mark.parametrize("rollback", ["replay", "staged"])
@pytest.mark.parametrize("accepted", range(9))
def test_6_kda_state_after_verify_and_commit_is_that_of_a_longer_prefill(loaded, rollback, accepted):
    """Prefill 37, verify 9, commit n drafts and the anchor == prefill 37 + n + 1, state and conv window."""
    ids = prompt_ids(46)
    speculative = Driver(loaded, width=9, rollback=rollback)
    speculative.prefill(ids[:37])
    speculative.verify(ids[37:])
    speculative.commit(accepted + 1, 9)
    longer = Driver(loaded, width=9, rollback=rollback)
    longer.prefill(ids[: 37 + accepted + 1])
    for name in ("conv", "temporal"):
        mine, theirs = (getattr(driver.pools.state, name)[:, 2] for driver in (speculative, longer))
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def draft_rows(harness: Harness, req) -> torch.Tensor:
    """The drafter's cache of the committed positions."""
    runner = harness.core.runner
    length = int(runner.future.new_seq_lens[req.req_pool_idx])
    return runner.pools.draft_kv.buffer[:, runner.pools.req_to_token[req.req_pool_idx, :length]].clone()


@pytest.fixture(scope="module")
def plain(target):
    return plain_states(target, PROMPT, 120)


def cut_every_step(harness: Harness, oracle: Oracle, width: int) -> None:
    """Right drafts behind a real draft step (which fills the schedule), and budgets of 1 .. width rows in turn."""
    turn = iter(range(10_000))

    def right(worker, step):
        oracle.turn = width - 2  # the planted error falls behind the window
        oracle(worker, step)

    use_drafts(harness, right)
    harness.scheduler.steps._budget.rows_for = lambda batch, full: 1 + next(turn) % full


@pytest.mark.parametrize("rollback", ["replay", "staged"])
@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("verify", ["static", "compact"])
def test_state_after_every_commit_is_bit_equal_to_plain_decoding(
    target, plain, tmp_path, monkeypatch, rollback, block, verify
):
    """Compact: the request, whose drafts are always right, is verified to a different length every step."""
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", verify)
    states, ids = plain
    table = tmp_path / "sps.json"
    table.write_text('{"sample_batch_tokens": [1], "sample_steps_per_sec": [1]}')
    drafter = write_tiny_drafter(tmp_path, block_size=block)
    harness = dspark(target, drafter, linear_rollback=rollback, speculative_dspark_sps_table_path=str(table), **EXACT)
    oracle = Oracle(harness, {"r": (len(PROMPT), ids)}, VOCAB)
    if verify == "static":
        harness.use_drafter(oracle)
    else:
        cut_every_step(harness, oracle, block + 1)
    req = advance(harness, PROMPT, 1)
    assert rounds_equal_to_plain(harness, req, states, STEPS) >= 8


@pytest.mark.parametrize("attention", [{}, MLA], ids=["dense", "mla"])
@pytest.mark.parametrize("drafts", ["own", "oracle"])
def test_drafter_cache_holds_exactly_one_entry_per_committed_token(target, plain, tmp_path, attention, drafts):
    """Whatever was drafted and rejected: the cache is that of injecting the committed tokens' features at once."""
    harness = dspark(target, write_tiny_drafter(tmp_path, block_size=8, **attention), **EXACT)
    features = InjectedFeatures(harness)
    if drafts == "oracle":
        harness.use_drafter(Oracle(harness, {"r": (len(PROMPT), plain[1])}, VOCAB))
    req = advance(harness, PROMPT, 30)
    drafter, rows = harness.scheduler.worker.drafter, draft_rows(harness, req)
    length = rows.shape[1]
    with torch.inference_mode():
        context = drafter.hidden_norm.forward(drafter.fc.forward(features.up_to(length)))
        expected, index = torch.zeros_like(rows), torch.arange(length)
        drafter.cache.store(context, index, index, expected)
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=1e-6)


def test_swapping_out_and_in_returns_the_drafters_cache_to_other_slots(target, tmp_path):
    harness = dspark(target, write_tiny_drafter(tmp_path), disable_overlap_schedule=True)
    req = advance(harness, PROMPT, 10)
    resources, runner = harness.core.resources, harness.core.runner
    before, slots = draft_rows(harness, req), list(req.kv_slots)
    with torch.inference_mode():
        resources.swap_out(req)
        runner.pools.draft_kv.buffer.fill_(torch.nan)
        resources.swap_in(req)
    assert req.kv_slots != slots
    assert torch.equal(draft_rows(harness, req), before)


@pytest.mark.parametrize("attention", [{}, MLA], ids=["dense", "mla"])
def test_12_a_reused_slot_inherits_nothing_from_its_last_owner(target, tmp_path, attention):
    drafter = write_tiny_drafter(tmp_path, block_size=8, **attention)
    harness = dspark(target, drafter, max_running_requests=1, max_total_tokens=120)
    first = harness.run(request("a", random_prompt(30, 3), temperature=1.0, max_new_tokens=50))
    second = harness.run(request("bb", random_prompt(9, 4)))["bb"]
    alone = dspark(target, drafter).run(request("bb", random_prompt(9, 4)))["bb"]
    assert first["a"].reason.type == "length"
    assert second.ids == alone.ids
    assert second.spec.accept_histogram == alone.spec.accept_histogram


def poison(harness: Harness) -> None:
    """NaN into everything that no live token owns; everything is free at this point."""
    pools, worker = harness.core.runner.pools, harness.scheduler.worker
    for tensor in (pools.kv.buffer, pools.draft_kv.buffer, pools.state.conv, pools.state.temporal, *pools.rollback):
        tensor.fill_(torch.nan)
    worker.buffers.features.fill_(torch.nan)


@pytest.mark.parametrize("attention", [{}, MLA], ids=["dense", "mla"])
def test_12_poisoned_memory_and_padded_rows_change_nothing(target, tmp_path, attention):
    drafter = write_tiny_drafter(tmp_path, block_size=8, **attention)
    requests = [request("a", random_prompt(13, 1)), request("bb", random_prompt(40, 2), temperature=0.9)]
    clean = dspark(target, drafter).run(*requests)
    harness = dspark(target, drafter)
    poison(harness)
    worker = harness.scheduler.worker
    decode = worker.decode

    def padded(step):
        real = len(step.req_pool_indices)
        rows = torch.cat((step.req_pool_indices, torch.zeros(3, dtype=torch.int64)))
        result = decode(step._replace(req_pool_indices=rows))
        assert (result.accept_lens[real:] == 0).all()
        return result._replace(tokens=result.tokens[:real], accept_lens=result.accept_lens[:real])

    worker.decode = padded
    outcomes = harness.run(*requests)
    for rid, outcome in clean.items():
        assert outcomes[rid].ids == outcome.ids
        assert outcomes[rid].spec.accept_histogram == outcome.spec.accept_histogram
