"""Takes a step trace apart into decode rounds and says where the time of a round goes.

A round lasts from the launch of one decode step to the launch of the next. Host idle and device idle are different
things: the host is idle while it waits for a result, the device while nothing is enqueued for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from sgling.srt.observability.step_trace import DEVICE, HOST, Span

LAUNCH, WAIT, SLEEP = "launch", "wait for result", "sleep"


class Node(NamedTuple):
    """One named piece of work inside rounds; nanoseconds of its own, what it contains excluded, mean per round."""

    name: str
    lane: str
    calls: float
    nanoseconds: float


class Round(NamedTuple):
    """One decode round. ``spans`` begin inside it, outer before inner; times as in :class:`Span`."""

    begin: int
    end: int
    width: int
    spans: list[Span]

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end - self.begin

    def busy(self, lane: str) -> int:
        """Nanoseconds in which the lane does something; waiting is not doing."""
        intervals = [
            (max(span.begin, self.begin), min(span.end, self.end))
            for span in self.spans
            if span.lane == lane and span.name not in (WAIT, SLEEP)
        ]
        return _union(interval for interval in intervals if interval[1] > interval[0]) - self._waiting(lane)

    def _waiting(self, lane: str) -> int:
        """Waits that lie inside a working span of the lane."""
        inner = (s for s in self.spans if s.lane == lane and s.name == WAIT)
        return sum(min(span.end, self.end) - span.begin for span in inner)

    def idle_share(self, lane: str) -> float:
        """Share of the round in which the lane does nothing."""
        return 1 - self.busy(lane) / self.duration


def _union(intervals: Iterable[tuple[int, int]]) -> int:
    """Total length of the union."""
    total, reached = 0, None
    for begin, end in sorted(intervals):
        if reached is None or begin > reached:
            total += end - begin
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return total


def find_rounds(spans: Sequence[Span]) -> list[Round]:
    """Rounds between two consecutive decode launches; a prefill in between ends no round, it spoils it."""
    launches = [span for span in spans if span.lane == HOST and span.name == LAUNCH and span.args.get("kind")]
    rounds = []
    for this, following in zip(launches, launches[1:], strict=False):
        if this.args["kind"] == following.args["kind"] == "decode":
            inside = [span for span in spans if this.begin <= span.begin < following.begin]
            rounds.append(Round(this.begin, following.begin, this.args["width"], inside))
    return rounds


def typical_round(rounds: Sequence[Round]) -> Round:
    """The round of median duration among those of the most frequent width."""
    widths = [entry.width for entry in rounds]
    usual = max(set(widths), key=widths.count)
    same = sorted((entry for entry in rounds if entry.width == usual), key=lambda entry: entry.duration)
    return same[len(same) // 2]


def mean_nodes(rounds: Sequence[Round]) -> list[Node]:
    """Every named node with its mean own time per round, device first, in order of appearance."""
    totals: dict[tuple[str, str], list[float]] = {}
    for entry in rounds:
        for span, own in _own_times(entry.spans):
            row = totals.setdefault((span.lane, span.name), [0.0, 0.0])
            row[0] += 1
            row[1] += own
    count = len(rounds)
    nodes = [Node(name, lane, calls / count, own / count) for (lane, name), (calls, own) in totals.items()]
    return sorted(nodes, key=lambda node: node.lane != DEVICE)


def _own_times(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Each span with its duration minus the spans of its lane directly inside it."""
    own = [span.end - span.begin for span in spans]
    for lane in (HOST, DEVICE):
        open_spans: list[int] = []
        for i, span in enumerate(spans):
            if span.lane != lane:
                continue
            while open_spans and spans[open_spans[-1]].end <= span.begin:
                open_spans.pop()
            if open_spans:
                own[open_spans[-1]] -= span.end - span.begin
            open_spans.append(i)
    return list(zip(spans, own, strict=True))


def summary(rounds: Sequence[Round]) -> dict:
    """Figures of all rounds: count, milliseconds (mean, median), idle shares of host and device."""
    durations = [entry.duration / 1e6 for entry in rounds]
    total = sum(durations)

    def idle(lane: str) -> float:
        return 1 - sum(entry.busy(lane) for entry in rounds) / 1e6 / total

    return {
        "rounds": len(rounds),
        "mean_ms": total / len(rounds),
        "median_ms": median(durations),
        "host_idle": idle(HOST),
        "device_idle": idle(DEVICE),
    }
