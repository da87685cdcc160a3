"""Step traces: spans nest, shadows leave nothing behind, and shares are those of a hand-made timeline."""

from __future__ import annotations

import pytest

from sgling.srt.observability.rounds import LAUNCH, WAIT, find_rounds, mean_nodes, summary, typical_round
from sgling.srt.observability.step_trace import (
    DEVICE,
    HOST,
    HostAsDevice,
    Span,
    StepTrace,
    chrome_trace,
    read_trace,
    write_trace,
)


class Worker:
    def outer(self, x: int) -> int:
        return self.inner(x) + 1

    def inner(self, x: int) -> int:
        return 2 * x


def test_spans_nest_and_shadows_leave_nothing_behind():
    worker = Worker()
    own = worker.inner = lambda x: 10 * x  # a method somebody else replaced before
    trace = StepTrace(HostAsDevice())
    trace.watch(worker, "outer", "outer", describe=lambda result: {"result": result})
    trace.watch(worker, "inner", "inner", DEVICE)
    assert worker.outer(4) == 41
    outer, inner = trace.stop()
    assert (outer.name, outer.lane, outer.args, inner.lane) == ("outer", HOST, {"result": 41}, DEVICE)
    assert outer.begin <= inner.begin <= inner.end <= outer.end
    assert vars(worker) == {"inner": own}


def test_a_call_that_fails_still_fails():
    worker = Worker()
    trace = StepTrace(HostAsDevice())
    trace.watch(worker, "outer", "outer")
    with pytest.raises(TypeError):
        worker.outer("a")
    assert trace.stop() == [] and vars(worker) == {}


def timeline() -> list[Span]:
    """Two rounds of 100 ns; the host waits 20 in each, the device works 60."""
    spans = []
    for start in (0, 100, 200):
        spans += [
            Span(LAUNCH, HOST, start, start + 30, {"kind": "decode", "requests": 1, "width": 4}),
            Span("verify", DEVICE, start + 10, start + 70, {}),
            Span("L0 KDA", DEVICE, start + 20, start + 60, {}),
            Span("process", HOST, start + 50, start + 90, {}),
            Span(WAIT, HOST, start + 55, start + 75, {}),
        ]
    return spans


def test_rounds_know_idle_from_waiting():
    rounds = find_rounds(timeline())
    assert [(entry.begin, entry.end, entry.width) for entry in rounds] == [(0, 100, 4), (100, 200, 4)]
    assert rounds[0].busy(DEVICE) == 60
    assert rounds[0].busy(HOST) == 30 + 40 - 20
    assert summary(rounds) == pytest.approx(
        {"rounds": 2, "mean_ms": 1e-4, "median_ms": 1e-4, "host_idle": 0.5, "device_idle": 0.4}
    )
    assert typical_round(rounds).width == 4


def test_a_prefill_spoils_the_round_it_falls_into():
    spans = timeline()
    spans[5] = spans[5]._replace(args={"kind": "prefill", "requests": 1, "width": 1})
    assert find_rounds(spans) == []


def test_own_times_add_up_to_the_outermost_spans():
    nodes = {node.name: node for node in mean_nodes(find_rounds(timeline()))}
    assert (nodes["verify"].nanoseconds, nodes["L0 KDA"].nanoseconds) == (20, 40)
    assert (nodes["process"].nanoseconds, nodes[WAIT].nanoseconds, nodes[WAIT].calls) == (20, 20, 1)


def test_a_trace_survives_the_file(tmp_path):
    path = tmp_path / "deep" / "a.trace.json.gz"
    write_trace(path, chrome_trace(timeline(), 0, {"device": "cpu"}))
    spans, facts = read_trace(path)
    assert sorted(spans) == sorted(timeline()) and facts == {"device": "cpu"}
