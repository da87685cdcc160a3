"""Where an operator runs: the questions every ``__init__`` asks before it picks an implementation."""

import logging

from torch import Tensor

logger = logging.getLogger(__name__)

_refused: dict[str, str] = {}
_cuda_kernels, _pdl = True, True

SMALL_ROWS = 160  # up to here a product is a decode step: one kernel form, so a row's bits do not depend on the rest


def use_triton(x: Tensor) -> bool:
    """Whether operands like ``x`` go to the GPU's kernels: CUDA C++ where they serve, else Triton.

    Tests replace this to run both on a CPU, in the emulation and in Triton's interpreter.
    """
    return x.is_cuda


def set_kernel_switches(cuda_kernels: bool = True, pdl: bool = True) -> None:
    """This process's switches, before the first graph is captured.

    Args:
        cuda_kernels: whether CUDA C++ kernels serve; otherwise their Triton twins do.
        pdl: whether a node may start before its predecessor ends (programmatic dependent launch). Changes no bit.
    """
    global _cuda_kernels, _pdl
    _cuda_kernels, _pdl = cuda_kernels, pdl


def cuda_kernels_enabled() -> bool:
    """Whether CUDA C++ kernels may serve."""
    return _cuda_kernels


def pdl_enabled() -> bool:
    """Whether nodes may be launched programmatically dependent; asked at every launch of a CUDA or Triton kernel."""
    return _pdl


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
