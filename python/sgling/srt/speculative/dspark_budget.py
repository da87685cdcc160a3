"""How many rows a step may verify: the hardware-aware prefix scheduler (docs/dspark.md §2.6).

With R requests of which every root is verified, n further drafts commit R + (sum of their survival) tokens on average
and cost T(R, R + n): the budget is the n with the best ratio. Which drafts they are is decided on the device, by their
current survival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sgling.srt.config.depth_table import DepthTable
from sgling.srt.config.dspark_tables import SpsTable
from sgling.srt.speculative.confidence_history import ConfidenceHistory, survival

_NEGLIGIBLE = 1e-6


class StepCost(Protocol):
    """What a round costs, in any unit."""

    def of(self, requests: int, rows: np.ndarray) -> np.ndarray:
        """Cost of rounds of ``requests`` requests that verify ``rows`` [n] rows in all."""


class ProfiledCost:
    """Cost out of a file of step rates by verify rows."""

    def __init__(self, table: SpsTable):
        self._table = table

    def of(self, requests: int, rows: np.ndarray) -> np.ndarray:
        """See :class:`StepCost`."""
        return 1.0 / np.array([self._table.rate(int(count)) for count in rows])


class MeasuredCost:
    """Cost measured on this machine at every (batch, mean width); linear between, never falling with rows."""

    def __init__(self, table: DepthTable):
        self._table = table

    def of(self, requests: int, rows: np.ndarray) -> np.ndarray:
        """See :class:`StepCost`."""
        ms = np.maximum.accumulate(np.array(self._table.row(requests)))
        return np.interp(rows / requests, np.arange(1, len(ms) + 1), ms)


class VerifyBudget:
    """Chooses ``verify_rows`` of every step.

    Attributes:
        align: spend the rows up to the next multiple of the width, which a graph would run anyway.
    """

    def __init__(self, cost: StepCost, temperatures: Sequence[float], align: bool):
        self._cost = cost
        self._temperatures = np.array(temperatures)
        self.align = align

    def rows_for(self, batch: Sequence[ConfidenceHistory], width: int) -> int:
        """Rows of the next step; a single request is verified whole, and so is one without old enough values."""
        count = len(batch)
        if count == 1 or width == 1:
            return count * width
        values = np.concatenate([self._survival(history)[: width - 1] for history in batch])
        values = np.sort(values[values >= _NEGLIGIBLE])[::-1]
        rows = count + np.arange(len(values) + 1)
        tokens = count + np.concatenate(([0.0], np.cumsum(values)))
        best = int(rows[np.argmax(tokens / self._cost.of(count, rows))])
        return -(-best // width) * width if self.align else best

    def _survival(self, history: ConfidenceHistory) -> np.ndarray:
        logits = history.lagged()
        return np.ones_like(self._temperatures) if logits is None else survival(logits, self._temperatures)
