"""Where an operator runs: the questions every ``__init__`` asks before it picks an implementation."""

import logging

from torch import Tensor

logger = logging.getLogger(__name__)

_refused: dict[str, str] = {}

SMALL_ROWS = 160  # up to here a product is a decode step: one kernel form, so a row's bits do not depend on the rest


def use_triton(x: Tensor) -> bool:
    """Whether operands like ``x`` go to the Triton kernels. Tests replace this to run them in the interpreter."""
    return x.is_cuda


def is_decode_sized(rows: int) -> bool:
    """Whether a product over this many rows uses the row-invariant decode kernels; larger ones are prefill chunks."""
    return rows <= SMALL_ROWS


def usable(path: str, reason: str | None) -> bool:
    """Whether the fast path of that name serves: ``reason`` is the answer of its ``why_not``.

    The first refusal of a path is logged and kept for :func:`refused_fast_paths`: none is silent.
    """
    if reason is None:
        return True
    if path not in _refused:
        _refused[path] = reason
        logger.warning("Fast path %s is not used: %s", path, reason)
    return False


def refused_fast_paths() -> dict[str, str]:
    """Fast paths that refused operands since this process began, with the reason of the first refusal."""
    return dict(_refused)
