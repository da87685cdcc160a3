"""Where the rows of a step live: lengths, recurrent-state slots, KV slots and positions of every window."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StepMetadata(NamedTuple):
    """Pure functions of the request rows, the committed lengths and the page table, all int64 on the device.

    Attributes:
        seq_lens: [bs], committed length before the step; 0 for padded rows.
        state_slots: [bs], KDA state slot; 0 for padded rows.
        locs, positions: [bs, C], KV slot and position of the rows at ``seq_lens`` .. ``seq_lens + C - 1``; padded rows
            have slot 0 and positions 0 .. C - 1.
    """

    seq_lens: torch.Tensor
    state_slots: torch.Tensor
    locs: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def allocate(cls, max_batch: int, max_columns: int, device: str) -> StepMetadata:
        """Zero-filled buffers; ``locs`` and ``positions`` are flat, so that any batch and width has dense views."""

        def index_buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        size = max_batch * max_columns
        return cls(index_buffer(max_batch), index_buffer(max_batch), index_buffer(size), index_buffer(size))

    def views(self, batch: int, columns: int) -> StepMetadata:
        """The leading part of :meth:`allocate`'s buffers, for ``batch`` requests of ``columns`` rows."""
        windows = (flat[: batch * columns].view(batch, columns) for flat in (self.locs, self.positions))
        return StepMetadata(self.seq_lens[:batch], self.state_slots[:batch], *windows)

    def window(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(locs, positions) int64 [bs * width] of the leading ``width`` rows of each request; views when C = width."""
        return self.locs[:, :width].flatten(), self.positions[:, :width].flatten()
