"""What CUDA C++ kernels ask of their operands, as reasons for a ``why_not``."""

from __future__ import annotations

import torch
from torch import Tensor


def why_not_rows(name: str, rows: Tensor, apart: int = 16) -> str | None:
    """Reason why bf16 rows [..., D] cannot be read ``apart`` bytes at a time, or None.

    Rows may be strided, columns not; every row must begin at a multiple of ``apart`` bytes. D is not looked at.
    """
    if rows.dtype != torch.bfloat16:
        return f"{name} must be bf16, not {rows.dtype}"
    if rows.stride(-1) != 1:
        return f"{name} is not row major"
    if rows.data_ptr() % apart or any(stride * rows.element_size() % apart for stride in rows.stride()[:-1]):
        return f"rows of {name} do not begin at multiples of {apart} bytes"
    return None


def why_not_dense(name: str, x: Tensor) -> str | None:
    """Reason why ``x`` is not contiguous bf16 that begins at a multiple of 16 bytes, or None."""
    if x.is_contiguous() and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0:
        return None
    return f"{name} is not contiguous bf16 at a multiple of 16 bytes"
