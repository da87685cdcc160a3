"""Where a device's time goes: busy inside steps, idle between them, and how far the host runs ahead.

Two timed events per step on the forward stream, read one step late when they are long complete: nothing here waits.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch


class StepMark(NamedTuple):
    """Events around one step.

    Attributes:
        start, end: recorded before its first and behind its last device work.
        chained: whether the previous step was still unprocessed when this one was launched; only then does a gap
            between the two count as idle (otherwise there was nothing to do).
    """

    start: torch.cuda.Event
    end: torch.cuda.Event
    chained: bool


class DeviceClock:
    """Running totals over decode and prefill steps since the last :meth:`reset`."""

    def __init__(self) -> None:
        self._open: deque[StepMark] = deque()
        self._current: StepMark | None = None
        self._last: StepMark | None = None
        self._began = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget the totals."""
        self.steps = self._ahead = 0
        self.busy_ms = self.idle_ms = self._launch_s = 0.0

    def begin(self) -> None:
        """Before the first launch of a step."""
        self._began = time.perf_counter()
        self._current = StepMark(_event(), _event(), bool(self._open))
        self._current.start.record()

    def end(self) -> StepMark:
        """Behind the last launch of a step; books how many earlier steps the device has not finished."""
        mark = self._current
        mark.end.record()
        self._ahead += sum(not earlier.end.query() for earlier in self._open)
        self._open.append(mark)
        self._launch_s += time.perf_counter() - self._began
        self.steps += 1
        return mark

    def settle(self, mark: StepMark) -> None:
        """Book a step whose result has arrived."""
        self._open.remove(mark)
        self.busy_ms += mark.start.elapsed_time(mark.end)
        if mark.chained and self._last is not None:
            self.idle_ms += max(0.0, self._last.end.elapsed_time(mark.start))
        self._last = mark

    @property
    def run_ahead(self) -> float:
        """Mean number of earlier steps still running when a launch was done; >= 1 means the device never waits."""
        return self._ahead / self.steps if self.steps else 0.0

    @property
    def idle_share(self) -> float:
        """Share of the device time between the first and the last step that no step filled."""
        total = self.busy_ms + self.idle_ms
        return self.idle_ms / total if total else 0.0

    @property
    def launch_us(self) -> float:
        """Mean host time to enqueue a step, microseconds."""
        return 1e6 * self._launch_s / self.steps if self.steps else 0.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
