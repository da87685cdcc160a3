"""Fixed-row test mode: every matrix product runs in blocks of exactly n rows.

A CPU library picks its kernel by the row count, so a row's last bits depend on how many rows ride along. With blocks of
a constant row count they do not, and "speculation changes nothing" can be tested bit for bit in fp32 (design §1.2).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_rows: int | None = None


def set_fixed_rows(n: int | None) -> None:
    """Turn the mode on for this process (n rows per block) or off (None). Raises ValueError for n < 1."""
    global _rows
    if n is not None and n < 1:
        raise ValueError(f"fixed rows must be at least 1, got {n}")
    _rows = n


def fixed_row_count() -> int | None:
    """Rows per block while the mode is on, else None. Read by linear, moe and mla on every call."""
    return _rows


@contextmanager
def fixed_rows(n: int | None) -> Iterator[None]:
    """Set the mode inside a with block and restore the previous setting after it."""
    previous = _rows
    set_fixed_rows(n)
    try:
        yield
    finally:
        set_fixed_rows(previous)


def in_row_blocks(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a row-wise product to x [N, ...]: all rows at once, or, in fixed-row mode, in blocks of exactly n rows.

    product maps [M, ...] to [M, ...]. The last block is filled with zero rows. Every block is a fresh buffer, so its
    memory alignment is constant too.
    """
    if _rows is None:
        return product(x)
    blocks = []
    for block in x.split(_rows):
        padded = x.new_zeros(_rows, *x.shape[1:])
        padded[: block.shape[0]] = block
        blocks.append(product(padded)[: block.shape[0]])
    return torch.cat(blocks)
