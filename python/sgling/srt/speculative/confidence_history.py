"""What the host remembers of a request's confidences: enough to look two steps back, never less."""

from __future__ import annotations

from collections import deque

import numpy as np

LAG = 2  # a decision uses values at least this many steps old, in every event loop
_DEPTH = 3


class ConfidenceHistory:
    """Raw confidence logits of one request's newest steps.

    The lag is the causal barrier: what a step verifies is decided without any value of that step or of the one whose
    result may still be in flight. It belongs to the request, so a slot's next owner inherits nothing.
    """

    def __init__(self) -> None:
        self._launched = 0
        self._processed = 0
        self._rows: deque[tuple[int, np.ndarray]] = deque(maxlen=_DEPTH)

    def begin(self) -> None:
        """A step of the request is being launched."""
        self._launched += 1

    def add(self, logits: np.ndarray) -> None:
        """Book the oldest unprocessed step's logits fp32 [gamma]; results arrive in launch order."""
        self._rows.append((self._processed, logits))
        self._processed += 1

    def lagged(self) -> np.ndarray | None:
        """Newest logits that the next launch may use, or None while there are none."""
        for index, logits in reversed(self._rows):
            if index <= self._launched - LAG:
                return logits
        return None


def survival(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Probability that drafts 1 .. j are all accepted, [..., gamma]; the device computes the same."""
    return np.nan_to_num(np.cumprod(1.0 / (1.0 + np.exp(-logits / temperatures)), axis=-1))
