"""The score card of the embedded model: what is asked, how judgements become shares, which bounds must hold.

Training measures it with its own forward, ``sgling eval pico`` with the serving path; both fill the same entries::

    {scenario: {split: {"answers": n, check: share, ..., "accept_length": at WIDTH},
                "accept_length_by_width": {"2": ...}, "acceptance_by_position": [...]}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sgling.srt.observability.acceptance import mean_accept_length, position_rates

from .generator.base import HELD_OUT, NEW_FAMILY, Sample
from .generator.mix import SCENARIOS, draw

WIDTH = 4
"""Verify width whose accept lengths are bounded; shares are judged on answers made at it."""
WIDTHS = (2, 4, 6, 8)
"""Verify widths reported."""
BOUNDS = {
    ("coding", "parses"): 0.98,
    ("coding", "example"): 0.80,
    ("coding", "passes"): 0.80,
    ("tool_calling", "parses"): 0.99,
    ("tool_calling", "exact"): 0.90,
    ("long_report", "all_figures"): 0.90,
    ("arithmetic", "exact"): 0.80,
    ("zh_chat", "clean"): 1.00,
}
"""Least share of held-out answers by scenario and check."""
ENDED_BOUND = 0.99
ACCEPT_BOUNDS = {"coding": 2.2, "tool_calling": 2.2}
OTHER_ACCEPT_BOUND = 1.5
SPREAD_BOUND = 0.3


class Gate(NamedTuple):
    """A bound from below and what was measured."""

    name: str
    value: float
    bound: float

    @property
    def reached(self) -> bool:
        return self.value >= self.bound


def splits_of(scenario: str) -> tuple[str, ...]:
    """Held-out words, and families never trained on (small talk has none)."""
    return (HELD_OUT,) if scenario == "small_talk" else (HELD_OUT, NEW_FAMILY)


def card_samples(scenario: str, split: str, count: int, seed: str = "eval") -> list[Sample]:
    """The samples asked."""
    return [draw(scenario, f"{seed}:{index}", split) for index in range(count)]


def shares(judgements: Iterable[Mapping[str, bool]]) -> dict[str, float]:
    """Number of answers, and the share of those a check applies to that pass it."""
    totals: dict[str, list[bool]] = {}
    count = 0
    for results in judgements:
        count += 1
        for name, passed in results.items():
            totals.setdefault(name, []).append(passed)
    return {"answers": count} | {name: round(sum(passed) / len(passed), 4) for name, passed in totals.items()}


def accept_figures(histograms: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Of step histograms by width: mean accept lengths, and acceptance by position at the widest."""
    lengths = {str(width): round(mean_accept_length(steps) or 1.0, 3) for width, steps in histograms.items()}
    rates = position_rates(histograms[max(histograms)])
    return {
        "accept_length_by_width": lengths,
        "acceptance_by_position": [None if rate is None else round(rate, 3) for rate in rates],
    }


def _share_ended(scenarios: Mapping[str, Any]) -> float:
    entries = [entry[HELD_OUT] for entry in scenarios.values()]
    return sum(entry["ended"] * entry["answers"] for entry in entries) / sum(entry["answers"] for entry in entries)


def gates(scenarios: Mapping[str, Any]) -> list[Gate]:
    """Every bound: shares on held-out words; accept lengths on the worse of both splits; the spread of scenarios."""
    found = [
        Gate(f"{scenario} {check}", scenarios[scenario][HELD_OUT][check], bound)
        for (scenario, check), bound in BOUNDS.items()
    ]
    found.append(Gate("ended", round(_share_ended(scenarios), 4), ENDED_BOUND))
    for scenario in SCENARIOS:
        least = min(scenarios[scenario][split]["accept_length"] for split in splits_of(scenario))
        found.append(Gate(f"{scenario} accept length", least, ACCEPT_BOUNDS.get(scenario, OTHER_ACCEPT_BOUND)))
    lengths = [entry[HELD_OUT]["accept_length"] for entry in scenarios.values()]
    return [*found, Gate("accept length spread", round(max(lengths) - min(lengths), 3), SPREAD_BOUND)]
