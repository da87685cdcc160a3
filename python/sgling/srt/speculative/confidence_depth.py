"""Width of a single request's next step by what the DSPARK drafter expects, not by what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgling.srt.config.depth_table import DepthTable
from sgling.srt.speculative.confidence_history import survival
from sgling.srt.speculative.depth import HYSTERESIS, FixedDepth, RequestDepth


class ConfidenceDepth(FixedDepth):
    """At batch 1 the width with the best expected tokens per time, from survival at least two steps old.

    Larger batches, and a request whose first values are still under way, run at full width.
    """

    def __init__(self, max_width: int, table: DepthTable, temperatures: Sequence[float]):
        super().__init__(max_width)
        self._costs = np.maximum.accumulate(np.array(table.row(1)[:max_width]))
        self._source = table.source
        self._temperatures = np.array(temperatures)
        self._chosen = max_width
        self._steps_at_width = [0] * max_width

    def width_for(self, batch: Sequence[RequestDepth]) -> int:
        """See :class:`DepthPolicy`."""
        limit = super().width_for(batch)
        logits = batch[0].confidences.lagged()
        if len(batch) > 1 or logits is None:
            self._chosen = self.width
        else:
            self._choose(logits)
        width = min(self._chosen, limit)
        self._steps_at_width[width - 1] += 1
        return width

    def _choose(self, logits: np.ndarray) -> None:
        lengths = np.concatenate(([1.0], 1.0 + np.cumsum(survival(logits, self._temperatures))))
        rates = lengths / self._costs
        best = int(np.argmax(rates)) + 1
        if rates[best - 1] > (1 + HYSTERESIS) * rates[self._chosen - 1]:
            self._chosen = best

    def reason(self, request: RequestDepth) -> str:
        """See :class:`DepthPolicy`."""
        why = f"chosen by the drafter's confidence up to {self.width}"
        return why if request.cap is None else f"the request allows {request.cap}; {why}"

    def describe(self) -> dict:
        """See :class:`DepthPolicy`."""
        return {
            "mode": "confidence",
            "width": self._chosen,
            "max_width": self.width,
            "reason": "expected tokens per time at batch 1, full width above",
            "step_ms": self._costs.tolist(),
            "step_ms_source": self._source,
            "steps_at_width": list(self._steps_at_width),
        }
