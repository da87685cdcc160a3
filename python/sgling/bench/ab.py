"""Compares two runs on step time = mean TPOT x mean accept length, with intervals, and says what is noise.

The product is taken as decode time over verify steps, which it equals when all answers are equally long; otherwise the
product of the means would move with the spread of the accept lengths.

TPOT alone mixes the runtime with the luck of the drafts; peaks are maxima over a one-second grid and wander with its
phase. Neither decides here. Intervals are percentile bootstraps over blocks of neighbouring requests (they share the
machine's mood), over runs where a side has several, and paired where both sides answered the same prompts. A side with
a single run of its own cannot show how it would differ from its next run; there the drift seen inside the runs widens
the interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sgling.bench.metrics import Distribution

ACCEPT_TOLERANCE = 0.05  # accept lengths closer than this are the same for a runtime-only change
_WORKLOAD = ("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "max_concurrency")


class Run(NamedTuple):
    """Requests of one run: float64 [n] each.

    Attributes:
        tpot_ms: NaN where a request has none.
        committed, steps: tokens committed by verify steps, verify steps; 0 without speculation.
    """

    tpot_ms: np.ndarray
    committed: np.ndarray
    steps: np.ndarray

    def take(self, index: np.ndarray) -> Run:
        """The requests of an index."""
        return Run(*(field[index] for field in self))


class Figures(NamedTuple):
    """Mean TPOT (ms), mean accept length (1 without speculation), and milliseconds per verify step."""

    tpot: float
    accept: float
    step: float


class Interval(NamedTuple):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether ``value`` is outside."""
        return not self.low <= value <= self.high


class Comparison(NamedTuple):
    """B against A. ``tpot`` and ``step`` are ratios B / A, ``accept`` is the difference B - A.

    Attributes:
        paired: both sides answered the same prompts in the same order.
        drift: how far the comparison moves between the halves of the runs; widens ``tpot`` and ``step``. 0 where
            several runs or interleaving show more.
    """

    a: Figures
    b: Figures
    tpot: Interval
    accept: Interval
    step: Interval
    paired: bool
    drift: float


def run_of_requests(requests: Sequence[dict]) -> Run:
    """A run from ``sgling.requests`` of a record."""
    tpot = [math.nan if entry["tpot_ms"] is None else entry["tpot_ms"] for entry in requests]
    columns = ([entry[name] for entry in requests] for name in ("committed", "verify_steps"))
    return Run(*(np.asarray(column, dtype=np.float64) for column in (tpot, *columns)))


def run_of_details(record: dict) -> Run:
    """A run from upstream's ``--output-details``; its accept length is the record's, for every request alike."""
    tpots = [Distribution.of_seconds(itls).mean for itls in record["itls"]]
    tpot = np.asarray([math.nan if value is None else value for value in tpots], dtype=np.float64)
    steps = np.full(len(tpot), 1.0 if record.get("accept_length") else 0.0)
    return Run(tpot, steps * (record.get("accept_length") or 0.0), steps)


def figures(runs: Sequence[Run]) -> Figures:
    """Mean TPOT over requests, mean accept length over verify steps, decode time over verify steps."""
    tpots, committed, steps = (np.concatenate(columns) for columns in zip(*runs, strict=True))
    known = np.isfinite(tpots)
    tpot = float(tpots[known].mean()) if known.any() else math.nan
    if not steps[known].sum():
        return Figures(tpot, 1.0, tpot)
    time, count = (tpots[known] * committed[known]).sum(), steps[known].sum()
    return Figures(tpot, float(committed.sum() / steps.sum()), float(time / count))


def read_runs(path: str) -> tuple[list[Run], dict]:
    """(runs, first record) of a record file, one run per line. Raises ValueError naming what is missing."""
    records = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not records:
        raise ValueError(f"{path}: no record")
    runs = []
    for number, record in enumerate(records, 1):
        if requests := (record.get("sgling") or {}).get("requests"):
            runs.append(run_of_requests(requests))
        elif record.get("itls"):
            runs.append(run_of_details(record))
        else:
            raise ValueError(f"{path}:{number}: no figures per request; record with --output-details")
    if math.isnan(figures(runs).tpot):
        raise ValueError(f"{path}: no request has a TPOT (all failed, or all answers had one token)")
    return runs, records[0]


def workload_difference(a: dict, b: dict) -> str | None:
    """How the workloads of two records differ."""
    own = [(name, a.get(name), b.get(name)) for name in _WORKLOAD]
    own += [(name, (a.get("sgling") or {}).get(name), (b.get("sgling") or {}).get(name)) for name in ("cache_state",)]
    wrong = [f"{name} {left} and {right}" for name, left, right in own if left != right]
    return "; ".join(wrong) or None


def same_prompts(a: dict, b: dict) -> bool:
    """Whether two records of one workload sent the same prompts in the same order."""
    seeds = [(record.get("sgling") or {}).get("seed") for record in (a, b)]
    return None not in seeds and seeds[0] == seeds[1]


def _block_index(rng: np.random.Generator, count: int) -> np.ndarray:
    """A resample of ``count`` requests by blocks of about sqrt(count) neighbours, on a circle."""
    length = max(round(math.sqrt(count)), 1)
    starts = rng.integers(count, size=-(-count // length))
    return ((starts[:, None] + np.arange(length)) % count).ravel()[:count]


def _resample(rng: np.random.Generator, a: Sequence[Run], b: Sequence[Run], paired: bool) -> tuple[Figures, Figures]:
    drawn = []
    shared: dict[int, np.ndarray] = {}
    for runs in (a, b):
        side = []
        for position, pick in enumerate(rng.integers(len(runs), size=len(runs))):
            run = runs[pick]
            count = len(run.tpot_ms)
            index = shared.get(position) if paired else None
            if index is None or len(index) != count:
                index = _block_index(rng, count)
            shared[position] = index
            side.append(run.take(index))
        drawn.append(figures(side))
    return drawn[0], drawn[1]


def _halves(run: Run) -> list[float]:
    return [figures([run.take(part)]).step for part in np.array_split(np.arange(len(run.tpot_ms)), 2)]


def drift_of(a: Sequence[Run], b: Sequence[Run], paired: bool) -> float:
    """How far the comparison moves from the first to the second half of the runs.

    Paired runs answered the same prompts, so their ratio is compared; otherwise each side's own step time is.
    """
    if min(len(run.tpot_ms) for run in (*a, *b)) < 4:
        return 0.0
    if paired and [len(run.tpot_ms) for run in a] == [len(run.tpot_ms) for run in b]:
        moves = [(x[1] / y[1]) / (x[0] / y[0]) for x, y in zip(map(_halves, a), map(_halves, b), strict=True)]
    else:
        moves = [late / early for early, late in map(_halves, (*a, *b))]
    return max((abs(move - 1) for move in moves if math.isfinite(move)), default=0.0)


def compare(a: Sequence[Run], b: Sequence[Run], paired: bool, interleaved: bool, resamples: int = 2000) -> Comparison:
    """B against A with 95 % intervals; deterministic."""
    rng = np.random.default_rng(0)
    first, second = figures(a), figures(b)
    draws = [_resample(rng, a, b, paired) for _ in range(resamples)]
    with np.errstate(invalid="ignore"):
        tpot = np.asarray([right.tpot / left.tpot for left, right in draws])
        step = np.asarray([right.step / left.step for left, right in draws])
    accept = np.asarray([right.accept - left.accept for left, right in draws])
    alone = not interleaved and min(len(a), len(b)) < 2
    drift = drift_of(a, b, paired) if alone else 0.0

    def interval(value: float, sample: np.ndarray, extra: float = 0.0) -> Interval:
        low, high = np.nanpercentile(sample, [2.5, 97.5])
        return Interval(value, float(low) - extra, float(high) + extra)

    return Comparison(
        first,
        second,
        interval(second.tpot / first.tpot, tpot, drift),
        interval(second.accept - first.accept, accept),
        interval(second.step / first.step, step, drift),
        paired,
        drift,
    )


class Verdict(NamedTuple):
    """``outcome``: "faster", "slower", "same" or "undecided" (B against A); ``text`` says it in words."""

    outcome: str
    text: str
    accept_changed: bool


def verdict(result: Comparison, min_effect: float) -> Verdict:
    """What the comparison shows. Differences inside the interval or below ``min_effect`` are noise."""
    step, effect = result.step, result.step.value - 1
    width = max(step.high - 1, 1 - step.low)
    changed = abs(result.accept.value) > ACCEPT_TOLERANCE and result.accept.excludes(0.0)
    if step.excludes(1.0) and abs(effect) >= min_effect:
        outcome = "slower" if effect > 0 else "faster"
        text = f"B is {outcome}: its step takes {abs(effect):.1%} {'more' if effect > 0 else 'less'} time"
    elif width <= max(2 * min_effect, 0.02):
        outcome = "same"
        text = f"no difference: {effect:+.1%} is noise, and anything above {width:.1%} would have shown"
    else:
        outcome = "undecided"
        text = f"undecided: {effect:+.1%} is inside the noise, which hides anything below {width:.1%}"
    if changed:
        text += f"; accept length changed by {result.accept.value:+.2f}: this is not a runtime-only change"
    return Verdict(outcome, text, changed)


def format_comparison(result: Comparison, decided: Verdict) -> str:
    """The table and the verdict."""

    def percent(ratio: Interval) -> str:
        return f"{ratio.value - 1:+.1%} ({ratio.low - 1:+.1%} to {ratio.high - 1:+.1%})"

    accept = result.accept
    a, b = result.a, result.b
    how = "same prompts, paired" if result.paired else "not paired"
    lines = [
        f"{'':22}{'A':>10}{'B':>10}   B against A (95 % interval, {how})",
        f"{'mean TPOT (ms)':22}{a.tpot:>10.3f}{b.tpot:>10.3f}   {percent(result.tpot)}",
        f"{'mean accept length':22}{a.accept:>10.3f}{b.accept:>10.3f}   "
        f"{accept.value:+.3f} ({accept.low:+.3f} to {accept.high:+.3f})",
        f"{'step time (ms)':22}{a.step:>10.3f}{b.step:>10.3f}   {percent(result.step)}",
    ]
    if result.drift:
        lines.append(
            f"one run per side: widened by the drift inside the runs, {result.drift:.1%} (interleave for less)"
        )
    return "\n".join([*lines, f"verdict: {decided.text}"])
