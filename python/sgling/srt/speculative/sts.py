"""Sequential temperature scaling of a drafter's confidence (docs/dspark.md §2.5).

Left to right, with the temperatures before it frozen, each position takes the temperature that makes its survival best
calibrated. It moves budgets and lengths, never the law of the output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

GRID = np.logspace(-1, 1, 41)  # temperatures 0.1 .. 10
BINS = 15


class StsFit(NamedTuple):
    """Result of :func:`fit_temperatures`.

    Attributes:
        temperatures: one per draft of the block.
        num_samples: rounds it was fitted to.
        ece_before, ece_after: expected calibration error of the survival of each draft, with temperatures 1 and fitted.
    """

    temperatures: tuple[float, ...]
    num_samples: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]

    def write(self, path: Path, dataset: str) -> None:
        """Write the file that ``--speculative-dspark-confidence-sts-path`` reads."""
        path.write_text(json.dumps({"dataset": dataset, **self._asdict()}, indent=1) + "\n", encoding="utf-8")


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> StsFit:
    """Fit to rounds that verified every draft.

    Args:
        logits: [N, gamma] raw confidence logits.
        accepted: [N] accepted drafts, 0 .. gamma.

    Raises:
        ValueError: nothing to fit to.
    """
    if len(logits) == 0 or len(logits) != len(accepted):
        raise ValueError(f"{len(logits)} rounds of logits and {len(accepted)} of outcomes: nothing to fit to")
    logits = logits.astype(np.float64)
    reached, plain = np.ones(len(logits)), np.ones(len(logits))
    temperatures, before, after = [], [], []
    for k in range(logits.shape[1]):
        hit = accepted > k
        candidates = [reached * _sigmoid(logits[:, k] / temperature) for temperature in GRID]
        errors = [calibration_error(candidate, hit) for candidate in candidates]
        best = int(np.argmin(errors))
        reached, plain = candidates[best], plain * _sigmoid(logits[:, k])
        temperatures.append(float(GRID[best]))
        before.append(calibration_error(plain, hit))
        after.append(errors[best])
    return StsFit(tuple(temperatures), len(logits), tuple(before), tuple(after))


def calibration_error(probability: np.ndarray, hit: np.ndarray) -> float:
    """Expected calibration error over equal-width bins: mean of |mean probability - hit rate|, weighted by bin size."""
    bins = np.minimum((probability * BINS).astype(int), BINS - 1)
    gap = np.bincount(bins, probability, BINS) - np.bincount(bins, hit.astype(np.float64), BINS)
    return float(np.abs(gap).sum() / len(hit))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))
