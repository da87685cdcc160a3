"""Which KV slot holds position p of request row r."""

from __future__ import annotations

import torch

from sgling.srt.mem_cache.allocator import SlotAllocator


class ReqToTokenPool:
    """Table int64 [R, width] on the device plus the free list of its rows (row 0 is the dummy, all zeros).

    ``width`` must hold the context and the speculative reservation: a narrower row would silently clamp a slice, so
    :meth:`write` raises instead.
    """

    def __init__(self, rows: int, width: int, device: str):
        self.table = torch.zeros(rows + 1, width, dtype=torch.int64, device=device)
        self.rows = SlotAllocator(rows)
        self.width = width
        self._pin = device != "cpu"

    def write(self, row: int, start: int, slots: list[int]) -> None:
        """Store the slots of positions ``start ..``; asynchronous on a GPU (pinned source)."""
        end = start + len(slots)
        if end > self.width:
            raise ValueError(f"request row holds {self.width} positions, {end} were written")
        source = torch.tensor(slots, dtype=torch.int64)
        source = source.pin_memory() if self._pin else source
        self.table[row, start:end].copy_(source, non_blocking=True)
