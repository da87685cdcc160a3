"""Conformance 9, 10 and 12 (docs/dspark.md §8): budgets are causal, packing changes nothing, nothing is inherited."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from model.tiny_drafter import MLA, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.depth_table import DepthTable
from sgling.srt.config.dspark_tables import SpsTable
from sgling.srt.core.ragged import RaggedVerifyLayout
from sgling.srt.speculative import confidence_history
from sgling.srt.speculative.confidence_depth import ConfidenceDepth
from sgling.srt.speculative.confidence_history import ConfidenceHistory
from sgling.srt.speculative.dspark_budget import MeasuredCost, ProfiledCost, VerifyBudget
from sgling_kernel.confidence import allocate_rows, survival
from sgling_kernel.verdict import draw_draft, round_seed
from spec.dspark_harness import dspark, step_of
from spec.harness import random_prompt, request
from spec.states import advance
from spec.test_dspark_rejection import (
    CHI2_DOF_15_AT_1E_4,
    DRAFTER,
    DRAWS,
    ROOT,
    chi2,
    first_two_tokens,
    joint_law,
    speculate,
    tables,
)


# -- 9: causality ----------------------------------------------------------------------------------------------------
def emitted_law(verifies_two) -> np.ndarray:
    """Law of the first token when x_1 = A and x_1 = B lead to different choices; p = .7/.3, q = .5/.5."""
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    law = np.zeros(2)
    for draft, probability in enumerate(q):
        if not verifies_two(draft):
            law += probability * p  # nothing verified: the bonus is a plain draw
            continue
        accept = min(1.0, p[draft] / q[draft])
        residual = np.maximum(p - q, 0)
        law[draft] += probability * accept
        law += probability * (1 - accept) * residual / residual.sum()
    return law


def test_9_the_argmax_over_current_values_breaks_the_law_and_early_stop_keeps_it():
    """The counterexample of §2.6: R = 1, gamma = 2, a_1 = .8, and the second confidence reveals the first draft."""
    rates, first = np.array([1.0, 0.5, 0.45]), 0.8
    second = {0: 0.9, 1: 0.0}  # c_2 after x_1 = A, after x_1 = B

    def tokens_per_time(draft: int) -> np.ndarray:
        lengths = np.cumsum([1.0, first, first * second[draft]])
        return lengths * rates

    assert np.allclose(tokens_per_time(0), [1.0, 0.9, 1.134]) and np.argmax(tokens_per_time(1)) == 0
    broken = emitted_law(lambda draft: np.argmax(tokens_per_time(draft)) > 0)
    assert np.allclose(broken, [0.85, 0.15])
    early_stop = emitted_law(lambda draft: tokens_per_time(draft)[1] > tokens_per_time(draft)[0])
    assert np.allclose(early_stop, [0.7, 0.3])


def test_9_lengths_from_this_rounds_own_drafts_fail_the_chi_square():
    table = tables(DRAWS)
    rows, starts = torch.arange(1, DRAWS + 1), torch.full((DRAWS,), 10)
    seeds = round_seed(table.seed[rows], starts, "draft")
    _, draft = draw_draft(DRAFTER[torch.full((DRAWS,), ROOT)], table.temperature[rows], seeds, starts, 0)
    leaky = torch.where(draft == int(DRAFTER[ROOT].argmax()), 2, 0)
    assert chi2(first_two_tokens(table, leaky), joint_law()) > 1000


def test_9_lengths_from_an_earlier_round_keep_the_law():
    """The lag: a limit that depends on all drafts and outcomes of the round before leaves this round's law alone."""
    table = tables(DRAWS)
    before = speculate(table, torch.full((DRAWS,), ROOT), 3)
    limits = (before.accept_lens - 1 + before.target_ids[:, 0]) % 3
    assert chi2(first_two_tokens(table, limits), joint_law()) < CHI2_DOF_15_AT_1E_4


def test_9_a_draft_never_decides_about_its_own_check():
    """Draft j moves the survival of the drafts behind it; whatever they become, its own check stays decided."""
    generator = torch.Generator().manual_seed(0)
    everybody = torch.ones(3, dtype=torch.bool)
    for _ in range(200):
        values = torch.rand(3, 4, generator=generator).cumprod(-1)
        rows = int(torch.randint(3, 15, (1,), generator=generator))
        lens = allocate_rows(values, everybody, rows, 5)
        for j in range(4):
            changed = values.clone()
            changed[0, j + 1 :] *= torch.rand(1, generator=generator)
            other = allocate_rows(changed, everybody, rows, 5)
            assert bool(lens[0] > j + 1) == bool(other[0] > j + 1)


def test_9_the_lag_is_two_steps_in_every_loop():
    history = ConfidenceHistory()
    seen = []
    for step in range(6):  # plain loop: a result is processed before the next launch
        seen.append(history.lagged())
        history.begin()
        history.add(np.array([float(step)]))
    assert [None if row is None else row[0] for row in seen] == [None, None, 0.0, 1.0, 2.0, 3.0]
    history, seen = ConfidenceHistory(), []
    for step in range(6):  # overlapped loop: one step late
        seen.append(history.lagged())
        history.begin()
        if step:
            history.add(np.array([float(step - 1)]))
    assert [None if row is None else row[0] for row in seen] == [None, None, 0.0, 1.0, 2.0, 3.0]


# -- the budget ------------------------------------------------------------------------------------------------------
class LinearCost:
    def __init__(self, base: float, per_row: float):
        self.base, self.per_row = base, per_row

    def of(self, requests: int, rows: np.ndarray) -> np.ndarray:
        return self.base + self.per_row * rows


def histories(*logits) -> list[ConfidenceHistory]:
    """Requests two steps after these raw logits."""
    made = []
    for row in logits:
        history = ConfidenceHistory()
        history.begin()
        history.add(np.array(row, dtype=np.float32))
        history.begin()
        made.append(history)
    return made


def brute_force(values: list[np.ndarray], cost, width: int) -> int:
    """Rows with the best tokens per cost over all prefix lengths of all requests."""
    best, count = None, len(values)
    for lengths in itertools.product(range(width), repeat=count):
        tokens = count + sum(v[:n].sum() for v, n in zip(values, lengths, strict=True))
        rows = count + sum(lengths)
        rate = tokens / cost.of(count, np.array([rows]))[0]
        if best is None or rate > best[0] + 1e-12:
            best = (rate, rows)
    return best[1]


@pytest.mark.parametrize("per_row", [0.01, 0.1, 0.3, 1.0])
def test_budget_is_the_best_over_all_prefix_lengths(per_row):
    rng = np.random.default_rng(1)
    cost = LinearCost(1.0, per_row)
    for _ in range(20):
        logits = rng.normal(0.5, 1.5, (3, 4))
        values = [confidence_history.survival(row, np.ones(4)) for row in logits]
        budget = VerifyBudget(cost, (1.0,) * 4, align=False)
        assert budget.rows_for(histories(*logits), 5) == brute_force(values, cost, 5)


def test_budget_without_old_values_and_at_batch_one_verifies_everything():
    budget = VerifyBudget(LinearCost(0.0, 1.0), (1.0,) * 4, align=False)
    fresh = [ConfidenceHistory(), ConfidenceHistory()]
    assert VerifyBudget(LinearCost(1.0, 0.0), (1.0,) * 4, False).rows_for(fresh, 5) == 10
    assert budget.rows_for(histories([-9.0] * 4), 5) == 5
    assert budget.rows_for(histories([-9.0] * 4, [-9.0] * 4), 5) == 2


def test_budget_aligns_to_the_width_and_drops_hopeless_drafts():
    flat = LinearCost(1.0, 0.0)
    assert VerifyBudget(flat, (1.0,) * 4, False).rows_for(histories([9.0] * 4, [-40.0] * 4), 5) == 6
    assert VerifyBudget(flat, (1.0,) * 4, True).rows_for(histories([9.0] * 4, [-40.0] * 4), 5) == 10


def test_costs():
    profiled = ProfiledCost(SpsTable((1, 4, 8), (100.0, 50.0, 25.0)))
    assert profiled.of(1, np.array([1, 3, 4, 7, 8, 100])).tolist() == [0.01, 0.01, 0.02, 0.02, 0.04, 0.04]
    table = DepthTable("t", {2: (1.0, 3.0, 2.0), 8: (2.0, 4.0, 6.0)}, {})
    assert MeasuredCost(table).of(2, np.array([2, 3, 4, 6])).tolist() == [1.0, 2.0, 3.0, 3.0]
    assert MeasuredCost(table).of(5, np.array([5, 10, 15])).tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("confident", [True, False])
def test_width_at_batch_one_follows_confidence_with_hysteresis(confident):
    depth = ConfidenceDepth(5, DepthTable("t", {1: (1.0, 1.5, 2.0, 2.5, 3.0)}, {}), (1.0,) * 4)
    request_depth = depth.join(None)
    assert depth.width_for([request_depth]) == 5
    request_depth.confidences = histories([6.0] * 4 if confident else [-3.0] * 4)[0]
    assert depth.width_for([request_depth]) == (5 if confident else 1)
    request_depth.confidences = histories([0.02] * 4)[0]  # width 2 promises 0.3 % more than width 1: no reason to move
    assert depth.width_for([request_depth]) == (2 if confident else 1)
    assert depth.width_for([request_depth, request_depth]) == 5
    assert depth.width_for([depth.join(2)]) == 2


# -- device arithmetic -----------------------------------------------------------------------------------------------
def allocate_slowly(values: torch.Tensor, real: list[bool], rows: int, width: int) -> list[int]:
    ranked = sorted(
        (-float(values[r, j]), j, r) for r in range(len(real)) if real[r] for j in range(width - 1)
    )[: max(0, rows - sum(real))]  # fmt: skip
    return [int(real[r]) + sum(owner == r for _, _, owner in ranked) for r in range(len(real))]


def test_allocation_ranks_by_survival_then_position_then_request():
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        values = (torch.randint(0, 5, (4, 3), generator=generator) / 4).cumprod(-1)
        real = torch.rand(4, generator=generator) > 0.3
        rows = int(torch.randint(0, 17, (1,), generator=generator)) + int(real.sum())
        for width in (1, 2, 4):
            assert allocate_rows(values, real, rows, width).tolist() == allocate_slowly(
                values, real.tolist(), rows, width
            )


def test_survival_of_nan_is_zero_and_host_and_device_agree():
    logits = torch.tensor([[1.0, 2.0, -1.0], [torch.nan, 3.0, 1.0]])
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    device = survival(logits, temperatures)
    assert device[1].tolist() == [0.0, 0.0, 0.0]
    host = confidence_history.survival(logits.numpy(), temperatures.numpy())
    np.testing.assert_allclose(device.numpy(), host, rtol=1e-6)


# -- 10: packing -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lens", [[3, 1, 4], [0, 2, 0], [4, 4, 4], [1, 1, 1], [0, 0, 0]])
@pytest.mark.parametrize("spare", [0, 1, 5])
def test_10_layout_packs_and_spreads(lens, spare):
    layout = RaggedVerifyLayout.build(torch.tensor(lens), 4, sum(lens) + spare)
    dense = torch.arange(1.0, 13.0).view(12, 1)
    kept = torch.arange(4) < torch.tensor(lens)[:, None]
    expected = torch.cat((dense[kept.flatten()], torch.zeros(spare, 1)))
    assert torch.equal(layout.pack(dense), expected)
    assert torch.equal(layout.spread(layout.pack(dense)), dense * kept.view(12, 1))
    assert layout.qo_indptr.tolist() == [0, *np.cumsum(lens).tolist()]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


def batch_of(harness, count: int):
    """Run ``count`` requests into decoding; returns (their host objects, a wide step over them and a padded row)."""
    requests = [request(f"r{i}", random_prompt(9 + 4 * i, i), max_new_tokens=100) for i in range(count)]
    harness.send(*requests)
    while len(harness.core.decode.running) < count:
        harness.step()
    reqs = harness.core.decode.running
    step = step_of(harness, reqs[0])
    for req in reqs:
        assert harness.core.resources.reserve_step(req)
    rows = torch.tensor([req.req_pool_idx for req in reqs] + [0])
    return reqs, step._replace(req_pool_indices=rows)


@pytest.mark.parametrize("rollback", ["replay", "staged"])
@pytest.mark.parametrize("lens", [[9, 9, 9, 0], [1, 1, 1, 0], [5, 1, 9, 0], [0, 0, 0, 0], [2, 7, 3, 0]])
@pytest.mark.parametrize("spare", [0, 3])
def test_10_packed_verify_equals_the_dense_one(target, tmp_path, monkeypatch, rollback, lens, spare):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    drafter = write_tiny_drafter(tmp_path, block_size=8)
    harness = dspark(
        target, drafter, linear_rollback=rollback, disable_overlap_schedule=True, enable_deterministic_inference=True
    )
    _, step = batch_of(harness, 3)
    worker, runner = harness.scheduler.worker, harness.core.runner
    pools = runner.pools
    live = [pools.kv.buffer, pools.draft_kv.buffer, pools.state.conv, pools.state.temporal, *pools.rollback]
    live += [runner.future.new_seq_lens, runner.future.output_tokens]
    with torch.inference_mode():
        worker.draft(step._replace(verify_rows=36))
        schedule = worker.scheduler.view(4)
        schedule.verify_lens.copy_(torch.tensor(lens))
        saved, results = [tensor.clone() for tensor in live], {}
        for mode, rows in (("cap-accept", 36), ("compact", max(1, sum(lens) + spare))):
            for tensor, value in zip(live, saved, strict=True):
                tensor.copy_(value)
            worker.options = type("Options", (), {"verify_mode": mode})
            results[mode] = worker.verify(step._replace(verify_rows=min(rows, 35) if mode == "compact" else rows))
            worker.extend(step)
            accepted = [result.clone() for result in (worker.buffers.accept_lens[:3], pools.state.conv[:, 1:4])]
            results[mode] = (results[mode].accept_lens.clone(), results[mode].tokens.clone(), *accepted,
                             pools.state.temporal[:, 1:4].clone())  # fmt: skip
    dense, packed = results["cap-accept"], results["compact"]
    if sum(lens):
        assert torch.equal(dense[0], packed[0])
        assert (packed[0] <= torch.tensor(lens).clamp_min(1)).all()
        for i, length in enumerate(dense[0].tolist()):
            assert dense[1][i, :length].tolist() == packed[1][i, :length].tolist()
        for mine, theirs in zip(dense[3:], packed[3:], strict=True):
            assert torch.equal(mine, theirs)


MODES = {"static": "static", "compact": "compact", "cap": "cap-accept"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("attention", [{}, MLA], ids=["dense", "mla"])
def test_10_ids_do_not_depend_on_the_schedule(target, tmp_path, monkeypatch, mode, overlap, attention):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", MODES[mode])
    table = tmp_path / "sps.json"
    table.write_text(json.dumps({"sample_batch_tokens": [1, 8, 16], "sample_steps_per_sec": [100, 60, 30]}))
    drafter = write_tiny_drafter(tmp_path / "d", block_size=8, **attention)
    harness = dspark(target, drafter, disable_overlap_schedule=not overlap,
                     speculative_dspark_sps_table_path=str(table))  # fmt: skip
    requests = [
        request(f"r{i}", random_prompt(11 + 9 * i, i), max_new_tokens=20 + 7 * i, temperature=0.7 * (i % 2))
        for i in range(5)
    ]
    outcomes = harness.run(*requests)
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "static")
    plain = dspark(target, drafter).run(*requests)
    assert {rid: o.ids for rid, o in outcomes.items()} == {rid: o.ids for rid, o in plain.items()}
    cut = sum(o.spec.proposed_drafts for o in outcomes.values()) < sum(8 * o.spec.verify_ct for o in outcomes.values())
    assert cut == (mode != "static")


def test_compact_verify_really_runs_fewer_rows(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    drafter = write_tiny_drafter(tmp_path, block_size=8)
    harness = dspark(target, drafter)
    _, step = batch_of(harness, 3)
    model, rows = harness.core.runner.model, []
    forward = model.forward
    model.forward = lambda batch, pools: (rows.append(len(batch.input_ids)), forward(batch, pools))[1]
    with torch.inference_mode():
        harness.scheduler.worker.decode(step._replace(verify_rows=11))
    assert rows == [11]


def test_9_the_next_draft_cannot_rewrite_a_schedule_that_is_on_its_way_to_the_host(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    harness = dspark(target, write_tiny_drafter(tmp_path, block_size=4), disable_overlap_schedule=True)
    req = advance(harness, random_prompt(9, 1), 3)
    worker = harness.scheduler.worker
    with torch.inference_mode():
        result = worker.decode(step_of(harness, req)._replace(verify_rows=5)).schedule
    before = [values.clone() for values in result]
    for buffer in worker.scheduler.schedule:
        buffer.zero_()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, before, strict=True))
    assert int(result.verify_lens) == 5


# -- 12: a fresh occupant --------------------------------------------------------------------------------------------
def test_12_a_fresh_request_on_a_used_slot_counts_as_surviving(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    harness = dspark(target, write_tiny_drafter(tmp_path), max_running_requests=1)
    first = advance(harness, random_prompt(12, 1), 20)
    assert first.depth.confidences.lagged() is not None
    row = first.req_pool_idx
    while harness.step():
        pass
    second = advance(harness, random_prompt(12, 2), 1)
    assert second.req_pool_idx == row
    assert second.depth.confidences.lagged() is None
    budget = VerifyBudget(LinearCost(1.0, 0.0), (1.0,) * 4, False)
    assert (budget._survival(second.depth.confidences) == 1.0).all()
