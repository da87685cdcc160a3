"""Adaptive width: the choice follows acceptance and cost, and no choice ever changes an output."""

from __future__ import annotations

import json
import random

import pytest

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.depth_table import DepthTable, never_cheaper, read_depth_table
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.speculative.depth import HYSTERESIS, PRIOR, PROBE_AFTER, Acceptance, AutoDepth
from sgling.srt.speculative.step_costs import measure_step_costs
from spec.harness import Harness, Oracle, random_drafter, random_prompt, request

VOCAB = 512
TABLE = DepthTable("test", {1: (10.0, 12.0, 14.0, 16.0, 18.0), 4: (10.0, 16.0, 26.0, 36.0, 46.0)}, {1: 8.0})
FEATURES = [{}, {"temperature": 1.0, "top_p": 0.9}, {"presence_penalty": 0.6, "temperature": 0.7}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


def requests(count: int = 3, **params):
    return [
        request(f"r{'x' * i}", random_prompt(9 + 17 * i, seed=i, vocab=VOCAB), **{**FEATURES[i], **params})
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def plain(model_dir):
    return Harness(model_dir, speculative_algorithm="none").run(*requests(max_new_tokens=60))


def auto_harness(model_dir, tmp_path, **kwargs) -> Harness:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE.to_json()))
    return Harness(model_dir, speculative_depth="auto", speculative_depth_table=str(path), **kwargs)


def drive(policy: AutoDepth, steps: int, accept_of, request_depth=None) -> list[int]:
    """Run the policy alone; ``accept_of(width)`` is what a step of that width commits. Returns the widths."""
    depth = request_depth or policy.join(None)
    widths = []
    for _ in range(steps):
        widths.append(policy.width_for([depth]))
        policy.observe(depth, widths[-1], accept_of(widths[-1]))
    return widths


# ---- the estimate ----


def test_expected_length_is_the_sum_of_survival_products():
    acceptance = Acceptance(3, rate=0.0)
    for accepted in (4, 3, 2, 1):  # each draft is reached by those that survive the one before
        acceptance.observe(4, accepted)
    # prior 0.7 counts as one step: p1 = (0.7 + 1 + 1 + 1 + 0) / 5, p2 = (0.7 + 1 + 1 + 0) / 4, p3 = (0.7 + 1 + 0) / 3
    p1, p2, p3 = 3.7 / 5, 2.7 / 4, 1.7 / 3
    assert acceptance.expected_lengths() == pytest.approx([1, 1 + p1, 1 + p1 + p1 * p2, 1 + p1 + p1 * p2 * (1 + p3)])


def test_positions_never_reached_are_taken_to_be_like_the_one_before():
    acceptance = Acceptance(4, rate=0.5)
    for _ in range(40):
        acceptance.observe(2, 2)
    assert acceptance.expected_lengths() == pytest.approx([1, 2, 3, 4, 5], abs=1e-4)


# ---- the choice ----


@pytest.mark.parametrize(
    ("accept_of", "best"), [(lambda width: width, 5), (lambda width: 1, 1), (lambda width: min(width, 2), 2)]
)
def test_the_width_converges_to_the_best_throughput(accept_of, best):
    policy = AutoDepth(5, TABLE)
    drive(policy, 200, accept_of)
    assert policy.width == best
    assert f"width {best}" in policy.describe()["reason"]


def test_speculation_comes_back_after_it_was_off():
    policy = AutoDepth(5, TABLE)
    depth = policy.join(None)
    drive(policy, 120, lambda width: 1, depth)
    assert policy.width == 1
    widths = drive(policy, 8 * PROBE_AFTER, lambda width: width, depth)
    assert policy.width == 5
    assert widths[0] == 1


def test_probes_get_rarer_while_they_find_nothing():
    policy = AutoDepth(5, TABLE)
    widths = drive(policy, 2000, lambda width: 1)
    late = widths[200:]
    assert sum(width > 1 for width in late) <= 0.02 * len(late)
    assert policy.describe()["probes"] >= 3


def test_a_small_promise_switches_nothing():
    promise = (1 + PRIOR) / (1 + 0.5 * HYSTERESIS)  # width 2 looks half a hysteresis better than width 1
    policy = AutoDepth(2, DepthTable("test", {1: (1.0, promise)}, {}))
    policy.width = 1
    drive(policy, PROBE_AFTER - 1, lambda width: 1)
    assert policy.width == 1 and "a switch needs" in policy.describe()["reason"]


def test_batches_use_their_own_costs():
    widths = []
    for size in (1, 4):  # 3 of 5 tokens: 3 in 14 ms win alone, 2 in 16 ms win in a batch of four
        policy = AutoDepth(5, TABLE)
        batch = [policy.join(None) for _ in range(size)]
        for _ in range(100):
            width = policy.width_for(batch)
            for depth in batch:
                policy.observe(depth, width, min(width, 3))
        widths.append(policy.width)
    assert widths == [3, 2]
    assert TABLE.row(3) == TABLE.row(4) == TABLE.row(9) != TABLE.row(1)


def test_every_rank_decides_alike():
    observed = random.Random(1)
    accepts = [observed.random() for _ in range(300)]

    def widths() -> list[int]:
        source = iter(accepts)
        return drive(AutoDepth(5, TABLE), 300, lambda width: 1 + int(next(source) * width))

    first = widths()
    assert first == widths()
    assert len(set(first)) > 1


# ---- through the scheduler ----


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("drafter", ["nextn", "random", "oracle"])
def test_auto_depth_equals_plain_decoding(model_dir, plain, tmp_path, drafter, overlap):
    harness = auto_harness(model_dir, tmp_path, disable_overlap_schedule=not overlap)
    wanted = requests(max_new_tokens=60)
    truth = {item.rid: (len(item.input_ids), plain[item.rid].ids) for item in wanted}
    drafters = {"nextn": None, "random": random_drafter(VOCAB), "oracle": Oracle(harness, truth, VOCAB)}
    harness.use_drafter(drafters[drafter])
    outcomes = harness.run(*wanted)
    assert {rid: o.ids for rid, o in outcomes.items()} == {rid: o.ids for rid, o in plain.items()}


@pytest.mark.parametrize("rollback", ["replay", "staged"])
def test_no_sequence_of_widths_changes_an_output(model_dir, plain, rollback):
    """The policy is replaced by dice: whatever a policy does, the ids are those of plain decoding."""
    dice = random.Random(7)
    harness = Harness(model_dir, speculative_num_steps=6, linear_rollback=rollback)
    harness.core.depth.width_for = lambda batch: dice.randint(1, 7)
    wanted = requests(max_new_tokens=60)
    truth = {item.rid: (len(item.input_ids), plain[item.rid].ids) for item in wanted}
    harness.use_drafter(Oracle(harness, truth, VOCAB))
    outcomes = harness.run(*wanted)
    assert {rid: o.ids for rid, o in outcomes.items()} == {rid: o.ids for rid, o in plain.items()}
    histogram = outcomes["r"].spec.width_histogram
    assert len(histogram) == 7 and all(histogram)


def test_the_reason_reaches_the_answer_and_the_server_info(model_dir, tmp_path):
    harness = auto_harness(model_dir, tmp_path)
    harness.use_drafter(random_drafter(VOCAB))
    spec = harness.run(request("a", random_prompt(9, seed=1), max_new_tokens=80))["a"].spec
    assert sum(spec.width_histogram) == spec.verify_ct
    assert spec.width_histogram[0] > 0 and "width 1 expects" in spec.depth_reason
    told = harness.core.depth.describe()
    assert (told["mode"], told["width"], told["step_ms_source"]) == ("auto", 1, "test")
    assert json.loads(json.dumps(told)) == told


def test_without_a_table_the_costs_are_measured_and_leave_no_trace(model_dir, plain):
    harness = Harness(model_dir, speculative_depth="auto", speculative_num_steps=2)
    told = harness.core.depth.describe()
    assert len(told["step_ms"]) == 3 and all(ms > 0 for ms in told["step_ms"])
    assert int(harness.core.runner.future.new_seq_lens.sum()) == 0
    outcomes = harness.run(*requests(max_new_tokens=60))
    assert {rid: o.ids for rid, o in outcomes.items()} == {rid: o.ids for rid, o in plain.items()}


def test_costs_are_measured_with_the_threads_of_a_serving_step(model_dir, monkeypatch):
    asked, measured = [], []
    harness = Harness(model_dir, speculative_num_steps=2, max_running_requests=4)
    runner, worker = harness.core.runner, harness.scheduler.worker
    decode = worker.decode
    monkeypatch.setattr(runner.threads, "for_rows", asked.append)
    monkeypatch.setattr(worker, "decode", lambda step: measured.append((asked[-1], step)) or decode(step))
    measure_step_costs(runner, worker, 3)
    assert {(len(step.req_pool_indices), step.width) for _, step in measured} == {
        (batch, width) for batch in (1, 4) for width in (1, 2, 3)
    }
    assert all(rows == len(step.req_pool_indices) * step.width for rows, step in measured)


@pytest.mark.parametrize("depth", ["fixed", "auto"])
def test_a_request_may_narrow_its_steps(model_dir, plain, tmp_path, depth):
    wanted = requests(max_new_tokens=60)
    wanted[0].speculative_max_width = 1
    harness = auto_harness(model_dir, tmp_path) if depth == "auto" else Harness(model_dir)
    alone = harness.run(wanted[0])["r"]
    assert alone.ids == plain["r"].ids
    assert len(alone.spec.width_histogram) == 1
    assert "the request allows 1" in alone.spec.depth_reason


# ---- tables ----


def test_a_disturbed_measurement_is_bounded_by_its_wider_neighbour():
    assert never_cheaper([39.0, 28.0, 32.0, 51.0, 41.0]) == (28.0, 28.0, 32.0, 41.0, 41.0)


def test_a_table_survives_the_file(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE.to_json()))
    assert read_depth_table(str(path)) == TABLE
    assert TABLE.break_even(1, 3) == 14 / 8


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "sgling-depth-table-1", "step_ms": {"1": [1, 2], "4": [1]}}']
)
def test_a_broken_table_is_named(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ServerArgsError, match="broken.json"):
        read_depth_table(str(path))
