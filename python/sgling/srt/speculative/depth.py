"""How wide the next step is: fixed, or chosen from what was accepted and what steps cost.

Whatever is decided, the output is the same (width only decides how many guesses are checked at once), so the policy is
free to be wrong. Decisions rest on processed results, one step late, and on a step-cost table that is equal on every
tensor-parallel rank; nothing here reads a device value or a clock, so all ranks decide alike.

The choice: with p_j the share of accepted j-th drafts among those whose predecessors were accepted, a step of width w
commits A(w) = 1 + p_1 + p_1 p_2 + ... + p_1 ... p_{w-1} tokens on average; the best width has the largest
A(w) / cost(w).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from sgling.srt.config.depth_table import DepthTable
from sgling.srt.config.spec_config import DEFAULT_NUM_STEPS
from sgling.srt.speculative.confidence_history import ConfidenceHistory

PRIOR = 0.7  # acceptance of a draft nobody has seen yet
REQUEST_RATE, SHARED_RATE = 0.1, 0.02  # weight of the newest step in a request's estimate, and in everybody's
INHERITED_WEIGHT = 4  # steps that the shared estimate counts for when a request starts from it
DECIDE_EVERY = 4  # steps between two decisions
HYSTERESIS = 0.03  # a switch must promise this much more throughput
PROBE_AFTER, PROBE_AFTER_MAX, PROBE_STEPS, PROBE_REACH = 48, 768, 3, 2


class Acceptance:
    """Running estimate of p_1 ... p_{W-1}; a position nobody reached yet is taken to be like the one before it."""

    def __init__(self, positions: int, rate: float):
        self._rate = rate
        self._values = [PRIOR] * positions
        self._weights = [0] * positions

    def inherit(self, rate: float) -> Acceptance:
        """A copy that trusts what it copied only a little."""
        child = Acceptance(len(self._values), rate)
        child._values = list(self._values)
        child._weights = [min(weight, INHERITED_WEIGHT) for weight in self._weights]
        return child

    def observe(self, width: int, accepted: int) -> None:
        """Book a step that committed ``accepted`` tokens (bonus included): drafts up to the first miss were tried."""
        for j in range(min(accepted, width - 1)):
            hit = float(j < accepted - 1)
            self._weights[j] += 1
            self._values[j] += max(self._rate, 1 / (self._weights[j] + 1)) * (hit - self._values[j])

    def expected_lengths(self) -> list[float]:
        """A(1) ... A(W)."""
        known, last = [], PRIOR
        for value, weight in zip(self._values, self._weights, strict=True):
            last = value if weight else last
            known.append(last)
        return list(accumulate([1.0, *accumulate(known, mul)]))


class RequestDepth:
    """One request's side of the choice.

    Attributes:
        cap: widest step the request allows, None = the server's.
        acceptance: its own estimate under ``auto``, else None.
        width_histogram: entry i counts its steps of width i + 1.
        confidences: what the DSPARK drafter expected of its newest steps, empty where nobody asks.
    """

    def __init__(self, cap: int | None, acceptance: Acceptance | None):
        self.cap = cap
        self.acceptance = acceptance
        self.width_histogram: list[int] = []
        self.confidences = ConfidenceHistory()

    def count(self, width: int) -> None:
        """Book one step."""
        missing = width - len(self.width_histogram)
        self.width_histogram += [0] * missing
        self.width_histogram[width - 1] += 1


class DepthPolicy(Protocol):
    """Chooses the width of every decode step."""

    def join(self, cap: int | None) -> RequestDepth:
        """State of a new request."""

    def width_for(self, batch: Sequence[RequestDepth]) -> int:
        """Width of the step that is launched next. A batch runs as wide as its least capped request allows."""

    def observe(self, request: RequestDepth, width: int, accepted: int) -> None:
        """Book the processed result of one request's step."""

    def reason(self, request: RequestDepth) -> str:
        """Why the request's steps are as wide as they are."""

    def describe(self) -> dict:
        """Plain JSON for ``/server_info``."""


def _limit(batch: Sequence[RequestDepth], max_width: int) -> int:
    return max(max_width if request.cap is None else min(request.cap, max_width) for request in batch)


class FixedDepth:
    """Every step is as wide as the flags say, or as a request allows."""

    def __init__(self, width: int):
        self.width = width

    def join(self, cap: int | None) -> RequestDepth:
        """See :class:`DepthPolicy`."""
        return RequestDepth(cap, None)

    def width_for(self, batch: Sequence[RequestDepth]) -> int:
        """See :class:`DepthPolicy`."""
        return _limit(batch, self.width)

    def observe(self, request: RequestDepth, width: int, accepted: int) -> None:
        """See :class:`DepthPolicy`."""
        request.count(width)

    def reason(self, request: RequestDepth) -> str:
        """See :class:`DepthPolicy`."""
        if request.cap is not None and request.cap < self.width:
            return f"the request allows {request.cap}"
        return f"fixed at {self.width} by the server's flags"

    def describe(self) -> dict:
        """See :class:`DepthPolicy`."""
        return {"mode": "fixed", "width": self.width, "max_width": self.width, "reason": "set by flags"}


class AutoDepth:
    """The width with the best expected throughput, with hysteresis; now and then a few wider steps to look around.

    A look brings a switch or doubles the time to the next one, so what it costs fades where it finds nothing.
    """

    def __init__(self, max_width: int, table: DepthTable):
        self.max_width = max_width
        self.width = min(max_width, DEFAULT_NUM_STEPS + 1)
        self.table = table
        self._shared = Acceptance(max_width - 1, SHARED_RATE)
        self._reason = "start value, nothing observed yet"
        self._launched = self._next_decision = 0
        self._probe_left = self._probes = self._switches = 0
        self._probe_pause = self._next_probe = PROBE_AFTER
        self._steps_at_width = [0] * max_width
        self._batch = 1

    def join(self, cap: int | None) -> RequestDepth:
        """See :class:`DepthPolicy`."""
        return RequestDepth(cap, self._shared.inherit(REQUEST_RATE))

    def width_for(self, batch: Sequence[RequestDepth]) -> int:
        """See :class:`DepthPolicy`."""
        self._launched += 1
        limit = _limit(batch, self.max_width)
        if self._launched >= self._next_decision:
            self._decide(batch)
        width = min(self._probe(), limit)
        self._steps_at_width[width - 1] += 1
        return width

    def _probe(self) -> int:
        """The chosen width, or a wider one while looking around."""
        if self._launched >= self._next_probe and self.width < self.max_width:
            self._probe_left = PROBE_STEPS
            self._probes += 1
            self._probe_pause = min(2 * self._probe_pause, PROBE_AFTER_MAX)
            self._next_probe = self._launched + self._probe_pause
        if self._probe_left == 0:
            return self.width
        self._probe_left -= 1
        return min(self.width + PROBE_REACH, self.max_width)

    def _decide(self, batch: Sequence[RequestDepth]) -> None:
        self._next_decision = self._launched + DECIDE_EVERY
        self._batch = len(batch)
        costs = self.table.row(self._batch)
        lengths = [sum(column) for column in zip(*(r.acceptance.expected_lengths() for r in batch), strict=True)]
        rates = [length / cost for length, cost in zip(lengths, costs, strict=False)]
        best = max(range(len(rates)), key=rates.__getitem__) + 1
        gain = rates[best - 1] / rates[self.width - 1] - 1
        per_request = [length / self._batch for length in lengths]
        facts = f"expects {per_request[best - 1]:.2f} tokens in {costs[best - 1]:.2f} ms"
        if best == self.width:
            self._reason = f"width {best} {facts}; {self._runner_up(rates, best)}"
        elif gain > HYSTERESIS:
            self._reason = f"width {best} {facts}, {gain:.0%} better than width {self.width} before"
            self.width = best
            self._switches += 1
            self._probe_pause = PROBE_AFTER
            self._next_probe = self._launched + PROBE_AFTER
        else:
            self._reason = (
                f"width {self.width} stays: width {best} promises {gain:.1%}, a switch needs {HYSTERESIS:.0%}"
            )

    def _runner_up(self, rates: list[float], best: int) -> str:
        """How much worse the next best width would be."""
        second = max((w for w in range(1, len(rates) + 1) if w != best), key=lambda w: rates[w - 1])
        return f"width {second} would be {1 - rates[second - 1] / rates[best - 1]:.0%} slower"

    def observe(self, request: RequestDepth, width: int, accepted: int) -> None:
        """See :class:`DepthPolicy`."""
        request.count(width)
        request.acceptance.observe(width, accepted)
        self._shared.observe(width, accepted)

    def reason(self, request: RequestDepth) -> str:
        """See :class:`DepthPolicy`."""
        return self._reason if request.cap is None else f"the request allows {request.cap}; {self._reason}"

    def describe(self) -> dict:
        """See :class:`DepthPolicy`."""
        return {
            "mode": "auto",
            "width": self.width,
            "max_width": self.max_width,
            "reason": self._reason,
            "expected_lengths": [round(length, 3) for length in self._shared.expected_lengths()],
            "step_ms": list(self.table.row(self._batch)),
            "step_ms_source": self.table.source,
            "steps_at_width": list(self._steps_at_width),
            "switches": self._switches,
            "probes": self._probes,
        }
