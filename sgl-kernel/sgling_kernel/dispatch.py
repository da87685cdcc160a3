"""Where an operator runs: the one question every ``__init__`` asks before it picks an implementation."""

from torch import Tensor

SMALL_ROWS = 160  # up to here a product is a decode step: one kernel form, so a row's bits do not depend on the rest


def use_triton(x: Tensor) -> bool:
    """Whether operands like ``x`` go to the Triton kernels. Tests replace this to run them in the interpreter."""
    return x.is_cuda


def is_decode_sized(rows: int) -> bool:
    """Whether a product over this many rows uses the row-invariant decode kernels; larger ones are prefill chunks."""
    return rows <= SMALL_ROWS
