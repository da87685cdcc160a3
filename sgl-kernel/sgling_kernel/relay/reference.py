"""Scatter and gather of relay buffers: tensors whose leading dimension is the request row.

Values that cross a step live in such buffers, so reordering, filtering or padding a batch never moves them. Padded rows
write row 0; which of them wins there is unspecified and never read by a real row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def scatter_relay(buffers: Sequence[torch.Tensor], rows: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Write ``values[i]`` [bs, ...] into ``buffers[i]`` [R, ...] at ``rows`` int64 [bs], in place."""
    for buffer, value in zip(buffers, values, strict=True):
        buffer.index_copy_(0, rows, value.to(buffer.dtype))


def gather_relay(buffers: Sequence[torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows [bs, ...] of each buffer [R, ...], as new tensors in the order given."""
    return tuple(buffer.index_select(0, rows) for buffer in buffers)


def poison_relay(buffers: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Debug aid: overwrite consumed rows with -1 (integers) or NaN (floats), so that a second read is visible."""
    for buffer in buffers:
        buffer.index_fill_(0, rows, torch.nan if buffer.is_floating_point() else -1)
