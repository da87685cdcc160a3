"""Named spans of the scheduler loop, on the host and on the device, as a Chrome/Perfetto trace.

Recording shadows methods on their instances and removing the shadows restores them, so a loop that is not traced runs
exactly the code it always runs: no branch, no clock, no cost.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

HOST, DEVICE = "host", "device"
_THREADS = {HOST: 1, DEVICE: 2}


class Span(NamedTuple):
    """One interval; nanoseconds since the start of the recording. Spans of a lane nest, they never cross."""

    name: str
    lane: str
    begin: int
    end: int
    args: dict


class DeviceClock(Protocol):
    """Marks points of the device's timeline without waiting for it."""

    def mark(self) -> Any:
        """A point: everything enqueued so far is before it."""

    def nanoseconds(self, mark: Any) -> int:
        """Time of a mark in ``perf_counter_ns``; may wait for the device."""


class HostAsDevice:
    """The clock of a device that works in the calling thread: the CPU."""

    def mark(self) -> int:
        """See :class:`DeviceClock`."""
        return time.perf_counter_ns()

    def nanoseconds(self, mark: int) -> int:
        """See :class:`DeviceClock`."""
        return mark


class Shadows:
    """Methods replaced on their instances, until :meth:`remove`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, method: str, substitute: Callable) -> None:
        """Shadow a method on its instance."""
        self._replaced.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, substitute)

    def remove(self) -> None:
        """Restore everything, the newest first."""
        while self._replaced:
            owner, method, own = self._replaced.pop()
            if own is None:
                delattr(owner, method)
            else:
                setattr(owner, method, own)


class StepTrace:
    """Records spans of the methods it was told to watch, until :meth:`stop`.

    Args:
        clock: the device's.
        annotate: context manager by span name, entered around each call (names for another profiler), or None.
    """

    def __init__(self, clock: DeviceClock, annotate: Callable[[str], AbstractContextManager] | None = None):
        self._clock = clock
        self._annotate = annotate or (lambda name: nullcontext())
        self._origin = time.perf_counter_ns()
        self._raw: list[tuple[str, str, Any, Any, dict]] = []
        self.shadows = Shadows()

    def watch(
        self, owner: Any, method: str, name: str, lane: str = HOST, describe: Callable[[Any], dict] | None = None
    ) -> None:
        """Record every call of ``owner.method``; ``describe`` turns its result into the span's arguments."""
        original = getattr(owner, method)
        read = time.perf_counter_ns if lane == HOST else self._clock.mark

        def traced(*args, **kwargs):
            with self._annotate(name):
                begin = read()
                result = original(*args, **kwargs)
                self._raw.append((name, lane, begin, read(), describe(result) if describe else {}))
            return result

        self.shadows.replace(owner, method, traced)

    def stop(self) -> list[Span]:
        """Remove every shadow; returns the spans in order of their begin (outer before inner)."""
        self.shadows.remove()
        spans = []
        for name, lane, begin, end, args in self._raw:
            if lane == DEVICE:
                begin, end = self._clock.nanoseconds(begin), self._clock.nanoseconds(end)
            spans.append(Span(name, lane, begin - self._origin, end - self._origin, args))
        return sorted(spans, key=lambda span: (span.begin, -span.end))


def chrome_trace(spans: Sequence[Span], rank: int, facts: dict) -> dict:
    """The JSON object format of the trace viewers; ``facts`` go into ``otherData``. Times there are microseconds."""
    events: list[dict] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for lane, thread in _THREADS.items():
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}})
    for span in spans:
        place = {"pid": rank, "tid": _THREADS[span.lane]}
        times = {"ts": span.begin / 1000, "dur": (span.end - span.begin) / 1000}
        events.append({"ph": "X", "name": span.name, "cat": span.lane, **place, **times, "args": span.args})
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": facts}


def write_trace(path: Path, trace: dict) -> None:
    """Write gzipped JSON, as both viewers open it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file)


def read_trace(path: Path) -> tuple[list[Span], dict]:
    """(spans, facts) of a file written by :func:`write_trace`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    spans = [
        Span(
            event["name"],
            event["cat"],
            round(event["ts"] * 1000),
            round((event["ts"] + event["dur"]) * 1000),
            event["args"],
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]
    return spans, trace["otherData"]
