"""What a depth sweep finds: points, the break-even rule, a recommendation with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

BUSY = 0.1  # repeats that differ by more than this were disturbed
NOISE = 0.01  # a deeper draft must be this much faster than a shallower one to be recommended


@dataclass(frozen=True)
class DepthPoint:
    """One width at one concurrency, over all repeats.

    Attributes:
        accept: tokens committed per verify step.
        tpot_ms: mean time per output token of the fastest repeat: other load on the machine only ever adds time.
        step_ms: time per verify step, mean TPOT x mean accept length.
        spread: how much longer the slowest repeat took, as a share.
    """

    concurrency: int
    width: int
    accept: float
    tpot_ms: float
    step_ms: float
    spread: float

    @property
    def steps(self) -> int:
        """Drafts per round."""
        return self.width - 1


def make_point(concurrency: int, width: int, repeats: Sequence[tuple[float, float]]) -> DepthPoint:
    """A point from the (TPOT in ms, accept length) of every repeat."""
    tpots, accepts = [tpot for tpot, _ in repeats], [accept for _, accept in repeats]
    tpot, accept = min(tpots), mean(accepts)
    return DepthPoint(concurrency, width, accept, tpot, tpot * accept, max(tpots) / tpot - 1)


@dataclass(frozen=True)
class Margin:
    """What the last draft of a width buys against the width before.

    Attributes:
        accept: growth of the accept length, as a share.
        cost: growth of the step time, as a share; the break-even value of ``accept``.
    """

    accept: float
    cost: float

    @property
    def pays(self) -> bool:
        """The break-even rule: accept length must grow by a larger share than the step time."""
        return self.accept > max(self.cost, 0.0)


def margins(points: Sequence[DepthPoint]) -> list[Margin | None]:
    """The margin of every point over its predecessor (widths ascending, one concurrency); None for the first."""
    found: list[Margin | None] = [None]
    for before, this in zip(points, points[1:], strict=False):
        found.append(Margin(this.accept / before.accept - 1, this.step_ms / before.step_ms - 1))
    return found


def recommend(points: Sequence[DepthPoint]) -> tuple[DepthPoint, str]:
    """The shallowest point within the noise of the fastest, and why."""
    fastest = min(points, key=lambda point: point.tpot_ms)
    chosen = next(point for point in points if point.tpot_ms <= fastest.tpot_ms * (1 + NOISE))
    first = points[0]
    facts = f"{chosen.tpot_ms:.2f} ms per token, {chosen.accept:.2f} tokens per {chosen.step_ms:.2f} ms step"
    if chosen is first:
        best = min(points[1:], key=lambda point: point.tpot_ms, default=None)
        if best is None:
            return chosen, f"{facts}; nothing else was measured"
        need = best.step_ms / first.step_ms
        return chosen, (
            f"no draft pays: {facts}; {best.steps} drafts would need an accept length above {need * first.accept:.2f} "
            f"and have {best.accept:.2f}"
        )
    reason = f"{facts}, {first.tpot_ms / chosen.tpot_ms:.2f}x the speed without drafts"
    if chosen is not fastest:
        reason += f"; {fastest.steps} drafts are only {1 - fastest.tpot_ms / chosen.tpot_ms:.1%} faster, within noise"
    return chosen, reason


def format_grid(points: Sequence[DepthPoint]) -> str:
    """The table of one concurrency, with the break-even rule applied to every further draft."""
    rows = ["steps  width  accept  TPOT ms   step ms  +accept    +step  the last draft"]
    for point, margin in zip(points, margins(points), strict=True):
        row = f"{point.steps:5d}  {point.width:5d}  {point.accept:6.3f}  {point.tpot_ms:7.3f}  {point.step_ms:8.3f}"
        if margin is not None:
            verdict = "pays" if margin.pays else "does not pay"
            row += f"  {margin.accept:+7.1%}  {margin.cost:+7.1%}  {verdict}"
        rows.append(row)
    return "\n".join(rows)


def spread_line(points: Sequence[DepthPoint]) -> str:
    """How far the repeats differ, and what to think of it."""
    worst = max(point.spread for point in points)
    advice = "; the machine is busy, do not trust differences of this size" if worst > BUSY else ""
    return f"slowest repeat against the fastest: {worst:+.0%} at most{advice}"
