"""Files of DSPARK's confidence scheduling: step rates by verify rows, and calibration temperatures."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from sgling.srt.config.flags import ServerArgsError


@dataclass(frozen=True)
class SpsTable:
    """Engine steps per second by the number of verify rows of a step (upstream's profile format).

    Attributes:
        rows: profiled row counts, ascending.
        steps_per_sec: rate at each of them.
    """

    rows: tuple[int, ...]
    steps_per_sec: tuple[float, ...]

    def rate(self, rows: int) -> float:
        """Rate at the largest profiled count that does not exceed ``rows`` (the smallest below all of them)."""
        return self.steps_per_sec[max(0, bisect_right(self.rows, rows) - 1)]


def read_sps_table(path: str) -> SpsTable:
    """``--speculative-dspark-sps-table-path``; raises :class:`ServerArgsError` naming file and reason."""
    option = f"--speculative-dspark-sps-table-path {path}"
    data = _read(path, option)
    rows, rates = data.get("sample_batch_tokens"), data.get("sample_steps_per_sec")
    if not isinstance(rows, list) or not isinstance(rates, list) or len(rows) != len(rates) or not rows:
        raise ServerArgsError(f"{option}: needs sample_batch_tokens and sample_steps_per_sec of one length")
    if any(a >= b for a, b in zip(rows, rows[1:], strict=False)) or any(not rate > 0 for rate in rates):
        raise ServerArgsError(f"{option}: batch tokens must increase and rates must be positive")
    return SpsTable(tuple(map(int, rows)), tuple(map(float, rates)))


def read_temperatures(path: str, block_size: int) -> tuple[float, ...]:
    """``--speculative-dspark-confidence-sts-path``: one temperature per draft of the block.

    Raises :class:`ServerArgsError` naming file and reason, a number other than ``block_size`` included.
    """
    option = f"--speculative-dspark-confidence-sts-path {path}"
    values = _read(path, option).get("temperatures")
    if not isinstance(values, list) or any(not isinstance(value, int | float) or value <= 0 for value in values):
        raise ServerArgsError(f"{option}: temperatures must be a list of positive numbers")
    if len(values) != block_size:
        raise ServerArgsError(f"{option}: {len(values)} temperatures, the drafter's block size is {block_size}")
    return tuple(map(float, values))


def _read(path: str, option: str) -> dict:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ServerArgsError(f"{option}: {error}") from error
    if not isinstance(data, dict):
        raise ServerArgsError(f"{option}: must hold a JSON object")
    return data
