"""Verify windows of unequal length, packed: which packed row belongs to which row of the full window.

Row-wise layers run on the packed rows only; layers that need a request's whole window (attention, KDA) and the verdict
see the dense [bs, W] form with zeros in the rows that were cut. All of it is device arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RaggedVerifyLayout(NamedTuple):
    """Packing of bs windows of at most W rows into ``num_rows`` rows.

    Attributes:
        verify_lens: int64 [bs], rows of each request, 0 (padded request) .. W.
        qo_indptr: int64 [bs + 1], first packed row of each request.
        row_of: int64 [bs * W], packed row of each dense row; ``num_rows`` where the row was cut.
        dense_of: int64 [num_rows], dense row of each packed row; ``bs * W`` for padding rows behind the last request.
    """

    verify_lens: torch.Tensor
    qo_indptr: torch.Tensor
    row_of: torch.Tensor
    dense_of: torch.Tensor

    @classmethod
    def build(cls, verify_lens: torch.Tensor, width: int, num_rows: int) -> RaggedVerifyLayout:
        """Layout of ``verify_lens`` int64 [bs]; their sum must not exceed ``num_rows`` (host integers: width, rows)."""
        indptr = torch.cat((verify_lens.new_zeros(1), verify_lens.cumsum(0)))
        offset = torch.arange(width, device=verify_lens.device)
        kept = offset < verify_lens.unsqueeze(-1)
        row_of = torch.where(kept, indptr[:-1].unsqueeze(-1) + offset, num_rows).flatten()
        row = torch.arange(num_rows, device=verify_lens.device)
        owner = torch.searchsorted(indptr[1:], row, right=True).clamp_max(len(verify_lens) - 1)
        dense = owner * width + row - indptr[owner]
        dense_of = torch.where(row < indptr[-1], dense, len(verify_lens) * width)
        return cls(verify_lens, indptr, row_of, dense_of)

    def spread(self, packed: torch.Tensor) -> torch.Tensor:
        """[num_rows, ...] -> [bs * W, ...], zeros in cut rows."""
        return _select(packed, self.row_of)

    def pack(self, dense: torch.Tensor) -> torch.Tensor:
        """[bs * W, ...] -> [num_rows, ...], zeros in padding rows."""
        return _select(dense, self.dense_of)


def _select(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` at ``index``; index ``len(x)`` gives zeros."""
    return torch.cat((x, x.new_zeros(1, *x.shape[1:]))).index_select(0, index)
