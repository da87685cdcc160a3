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


def gather_relay(
    buffers: Sequence[torch.Tensor], rows: torch.Tensor, out: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor, ...]:
    """Rows [bs, ...] of each buffer [R, ...] in the order given, as new tensors or written into ``out``."""
    picked = tuple(buffer.index_select(0, rows) for buffer in buffers)
    if out is None:
        return picked
    for target, value in zip(out, picked, strict=True):
        target.copy_(value)
    return tuple(out)


def window_candidates(output_tokens: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Root and drafts of each window: ``output_tokens`` int64 [R] at ``rows`` [bs], ``drafts`` [bs, W-1] -> [bs, W]."""
    return torch.cat((output_tokens.index_select(0, rows).unsqueeze(-1), drafts), dim=-1)


def take_accepted(sources: Sequence[torch.Tensor], accept_lens: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """The last accepted row of each window, of several tensors at once.

    ``sources`` [bs * width, ...], ``accept_lens`` int64 [bs]; a request that accepted nothing (padding) gives its
    first row -> new dense tensors [bs, ...].
    """
    last = (accept_lens - 1).clamp_min(0)
    select = torch.arange(len(accept_lens), device=accept_lens.device) * width + last
    return tuple(source.index_select(0, select) for source in sources)


def poison_relay(buffers: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Debug aid: overwrite consumed rows with -1 (integers) or NaN (floats), so that a second read is visible."""
    for buffer in buffers:
        buffer.index_fill_(0, rows, torch.nan if buffer.is_floating_point() else -1)
