"""How much of the serving time the device works, on a device that works in the calling thread (the CPU)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Sums up steps and the gaps between them; time without requests does not count.

    Attributes:
        busy_s: seconds inside steps.
        serving_s: seconds inside steps and between consecutive ones.
    """

    def __init__(self) -> None:
        self.busy_s = self.serving_s = 0.0
        self._last_end: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one device step."""
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        self.busy_s += end - begin
        self.serving_s += end - (begin if self._last_end is None else self._last_end)
        self._last_end = end

    def pause(self) -> None:
        """There is nothing to do: what follows is no gap."""
        self._last_end = None
