"""What one speculative step costs at every width: written by ``sgling sweep depth`` or measured at start-up, read by
``--speculative-depth auto``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from sgling.srt.config.flags import ServerArgsError

FORMAT = "sgling-depth-table-1"


def never_cheaper(step_ms: Sequence[float]) -> tuple[float, ...]:
    """Measured step times by width, cleaned: a wider step cannot be cheaper, so a narrower one that took longer was
    disturbed, and its wider neighbour is the better bound.
    """
    cleaned = list(accumulate(reversed(step_ms), min))
    return tuple(reversed(cleaned))


@dataclass(frozen=True)
class DepthTable:
    """Step times by batch size and width.

    Attributes:
        source: where the numbers come from, for people.
        step_ms: batch size -> milliseconds of one step at widths 1, 2, ... W; every row has the same length.
        plain_ms: batch size -> milliseconds of one step of plain decoding (no drafter at all), where it was measured.
    """

    source: str
    step_ms: dict[int, tuple[float, ...]]
    plain_ms: dict[int, float]

    @property
    def max_width(self) -> int:
        """Widest measured step."""
        return len(next(iter(self.step_ms.values())))

    def row(self, batch: int) -> tuple[float, ...]:
        """Step times of the smallest measured batch that holds ``batch`` requests, else of the largest measured."""
        holding = [size for size in self.step_ms if size >= batch]
        return self.step_ms[min(holding) if holding else max(self.step_ms)]

    def break_even(self, batch: int, width: int) -> float:
        """Accept length above which ``width`` beats decoding without drafts (plain where measured, else width 1)."""
        row = self.row(batch)
        return row[width - 1] / self.plain_ms.get(batch, row[0])

    def to_json(self) -> dict:
        """Plain JSON, read back by :meth:`from_json`."""
        return {
            "format": FORMAT,
            "source": self.source,
            "step_ms": {str(size): list(row) for size, row in self.step_ms.items()},
            "plain_ms": {str(size): value for size, value in self.plain_ms.items()},
        }

    @classmethod
    def from_json(cls, data: dict) -> DepthTable:
        """Check and read a table. Raises ValueError naming what is wrong."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"no depth table (format {FORMAT})")
        rows = {int(size): tuple(map(float, row)) for size, row in data["step_ms"].items()}
        if not rows or len({len(row) for row in rows.values()}) != 1:
            raise ValueError("step_ms must hold rows of one and the same length")
        if any(not value > 0 for row in rows.values() for value in row):
            raise ValueError("step times must be positive")
        plain = {int(size): float(value) for size, value in data.get("plain_ms", {}).items()}
        return cls(str(data.get("source", "unknown")), rows, plain)


def read_depth_table(path: str) -> DepthTable:
    """The table of a file; raises :class:`ServerArgsError` that names the file."""
    try:
        return DepthTable.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ServerArgsError(f"--speculative-depth-table {path}: {error}") from error
