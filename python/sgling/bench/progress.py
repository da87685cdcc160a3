"""A progress line on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from sgling.bench.result import RequestResult

_WIDTH = 30
_REDRAW_S, _LINE_S = 0.1, 10.0


class Progress:
    """Counts finished requests. Draws at most ten times a second, so that drawing costs the measurement nothing."""

    def __init__(self, total: int, enabled: bool = True, stream: TextIO | None = None, clock=time.monotonic):
        self._stream = stream or sys.stderr
        self._total, self._enabled, self._clock = total, enabled, clock
        self._is_terminal = self._stream.isatty()
        self._begin = self._drawn = clock()
        self.done = self.failed = self.tokens = 0

    def add(self, result: RequestResult) -> None:
        """A request has finished."""
        self.done += 1
        self.failed += not result.success
        self.tokens += result.output_len
        now = self._clock()
        if self._enabled and now - self._drawn >= (_REDRAW_S if self._is_terminal else _LINE_S):
            self._drawn = now
            self._draw(now)

    def line(self, now: float) -> str:
        """The line as shown."""
        filled = _WIDTH * self.done // self._total if self._total else _WIDTH
        seconds = max(now - self._begin, 1e-9)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        failed = f", {self.failed} failed" if self.failed else ""
        return f"[{bar}] {self.done}/{self._total} requests, {self.tokens / seconds:.1f} tok/s{failed}"

    def _draw(self, now: float) -> None:
        text = self.line(now)
        self._stream.write(f"\r{text}\x1b[K" if self._is_terminal else f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line on a terminal."""
        if self._enabled and self._is_terminal:
            self._draw(self._clock())
            self._stream.write("\n")
