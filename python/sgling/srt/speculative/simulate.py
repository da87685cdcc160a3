"""A forced accept length for benchmarks (``SGLANG_SIMULATE_ACC_LEN``): the work is real, the verdict is not."""

from __future__ import annotations


def checked_mean(mean: float | None) -> float | None:
    """The mean accept length to simulate, bonus included; None = true verdicts.

    Raises:
        ValueError: a mean below 1.
    """
    if mean is not None and mean < 1:
        raise ValueError(f"simulated accept length {mean}: at least the bonus token is accepted, so it is >= 1")
    return mean
