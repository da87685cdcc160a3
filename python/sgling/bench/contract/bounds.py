"""Bounds of a contract: absolute numbers, or relative to a recorded baseline."""

from __future__ import annotations

import re
from typing import NamedTuple

from sgling.bench.contract.yaml_reader import Entry

# Every figure a contract can bound, and which side of it is good.
METRICS = {
    "ttft_p95_ms": "max",
    "tpot_p95_ms": "max",
    "e2e_p99_ms": "max",
    "accept_length": "min",
    "fallback_ratio": "max",
    "task_success": "min",
    "invalid_tool_calls": "max",
    "failed_requests": "max",
}
_RELATIVE = re.compile(r"baseline\s*(?:([*+-])\s*(\d+(?:\.\d+)?))?")


class Bound(NamedTuple):
    """One promise.

    Attributes:
        side: "max" or "min".
        line: where the contract states it.
        operator: how ``number`` meets the baseline: "*", "+", "-"; "" for an absolute bound.
    """

    metric: str
    side: str
    number: float
    operator: str
    line: int

    def limit(self, baseline: float | None) -> float | None:
        """The limit in the metric's unit; None when a baseline is needed and missing."""
        if not self.operator:
            return self.number
        if baseline is None:
            return None
        factors = {"*": baseline * self.number, "+": baseline + self.number, "-": baseline - self.number}
        return factors[self.operator]

    def promise(self, baseline: float | None) -> str:
        """The promise in words."""
        limit, sign = self.limit(baseline), "<=" if self.side == "max" else ">="
        shown = "?" if limit is None else f"{limit:.4g}"
        return f"{sign} {shown}" + (f" (baseline {self.operator} {self.number:g})" if self.operator else "")

    def holds(self, measured: float, baseline: float | None) -> bool:
        """Whether a measured value keeps the promise; False without a needed baseline."""
        limit = self.limit(baseline)
        return limit is not None and (measured <= limit if self.side == "max" else measured >= limit)


def read_bounds(entry: Entry) -> list[Bound]:
    """Bounds of one scenario: ``metric: number``, ``metric: baseline * 1.1`` or ``metric: {max: ..., min: ...}``."""
    bounds: list[Bound] = []
    for metric, value in entry.mapping(tuple(METRICS)).items():
        if value.is_mapping:
            sides = value.mapping(("max", "min"))
            if not sides:
                raise value.error("has no bound; give max or min")
            bounds += [_bound(metric, side, part) for side, part in sides.items()]
        else:
            bounds.append(_bound(metric, METRICS[metric], value))
    return bounds


def _bound(metric: str, side: str, entry: Entry) -> Bound:
    value = entry.value()
    if not isinstance(value, str):
        return Bound(metric, side, entry.number(), "", entry.line)
    match = _RELATIVE.fullmatch(value.strip())
    if match is None:
        raise entry.error(f"must be a number or like 'baseline * 1.1', 'baseline + 5', 'baseline - 0.05'; is {value!r}")
    operator, number = match.groups()
    return Bound(metric, side, float(number) if number else 0.0, operator or "+", entry.line)
