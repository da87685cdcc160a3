"""Time limits of requests (SGLANG_REQ_WAITING_TIMEOUT, SGLANG_REQ_RUNNING_TIMEOUT), and ids that come twice."""

from __future__ import annotations

import pytest

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.managers.io_struct import AbortReq
from spec.harness import Harness, random_prompt, request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


def harness_with_limits(model_dir, monkeypatch, waiting: float = -1, running: float = -1, **kwargs) -> Harness:
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", str(waiting))
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", str(running))
    return Harness(model_dir, max_running_requests=2, **kwargs)


def age(harness: Harness, rid: str, seconds: float) -> None:
    """Make a live request older."""
    req = next(req for req in harness.core.live_requests() if req.rid == rid)
    req.created_at -= seconds
    req.admitted_at = None if req.admitted_at is None else req.admitted_at - seconds


def end_of(harness: Harness, rid: str) -> tuple:
    reason = harness.outcomes[rid].reason
    return reason.type, reason.status_code


def test_a_request_that_waited_too_long_ends_with_503_and_its_neighbours_go_on(model_dir, monkeypatch):
    harness = harness_with_limits(model_dir, monkeypatch, waiting=60)
    harness.send(*(request(f"r{i}", random_prompt(10, i), max_new_tokens=40) for i in range(4)))
    for _ in range(6):
        harness.step()
    for rid in ("r0", "r3"):  # r0 runs: only its wait is limited
        age(harness, rid, 100)
    harness.run()
    assert end_of(harness, "r3") == ("abort", 503)
    assert "waiting for more than 60 s" in harness.outcomes["r3"].reason.message
    assert [len(harness.outcomes[f"r{i}"].ids) for i in range(4)] == [40, 40, 40, 0]


def test_a_request_that_runs_too_long_ends_with_503_and_keeps_what_it_said(model_dir, monkeypatch):
    harness = harness_with_limits(model_dir, monkeypatch, running=60, chunked_prefill_size=16)
    harness.send(*(request(f"r{i}", random_prompt(50, i), max_new_tokens=200) for i in range(3)))
    while not harness.outcomes.get("r0") or len(harness.outcomes["r0"].ids) < 5:
        harness.step()
    for rid in ("r0", "r2"):  # r2 waits: only its running time is limited
        age(harness, rid, 100)
    harness.run()
    assert end_of(harness, "r0") == ("abort", 503)
    assert 5 <= len(harness.outcomes["r0"].ids) < 200
    assert [end_of(harness, f"r{i}") for i in (1, 2)] == [("length", None)] * 2


def test_time_swapped_out_counts_as_running_not_as_waiting(model_dir, monkeypatch):
    harness = harness_with_limits(model_dir, monkeypatch, waiting=60, max_total_tokens=150)
    harness.send(*(request(f"r{i}", random_prompt(40, i), max_new_tokens=60) for i in range(2)))
    while not harness.core.decode.num_retracted:
        harness.step()
    age(harness, "r1", 100)
    harness.run()
    assert end_of(harness, "r1") == ("length", None)


def test_without_limits_no_request_is_looked_at(model_dir, monkeypatch):
    harness = harness_with_limits(model_dir, monkeypatch)
    assert harness.core.deadlines.overdue(lambda: pytest.fail("looked")) == []


def test_a_second_request_with_a_live_id_does_not_disturb_the_first(model_dir):
    """Case E03: refusing it dropped the first one's stop rules, and the scheduler died at its next token."""
    alone = Harness(model_dir).run(request("x", random_prompt(20, 1), max_new_tokens=30))["x"]
    harness = Harness(model_dir)
    harness.send(request("x", random_prompt(20, 1), max_new_tokens=30), request("x", random_prompt(9, 2)))
    harness.run()
    assert harness.outcomes["x"].ids == alone.ids
    assert harness.outcomes["x"].reason == alone.reason
    refusals = [o for m in harness.messages for o in m.outputs if o.finished_reason and o.finished_reason.status_code]
    assert [refusal.finished_reason.status_code for refusal in refusals] == [400]


def test_an_abort_order_of_a_client_carries_no_status(model_dir):
    harness = Harness(model_dir)
    harness.send(request("x", random_prompt(20, 1), max_new_tokens=300))
    harness.step()
    harness.run(AbortReq(rid="x"))
    assert end_of(harness, "x") == ("abort", None)
