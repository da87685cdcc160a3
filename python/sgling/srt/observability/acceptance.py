"""Acceptance figures of a histogram: entry j = verify steps of which j drafts were accepted, 0 ... K."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def mean_accept_length(histogram: Sequence[int]) -> float | None:
    """Tokens committed per verify step, bonus included; None without a step."""
    steps = sum(histogram)
    return 1 + sum(count * accepted for accepted, count in enumerate(histogram)) / steps if steps else None


def position_rates(histogram: Sequence[int]) -> list[float | None]:
    """Share of drafts accepted at position 1 ... K among those whose predecessors were accepted; None: none there."""
    reached = list(accumulate(reversed(histogram)))[::-1]
    return [after / before if before else None for before, after in zip(reached, reached[1:], strict=False)]
