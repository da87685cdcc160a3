"""Paged MLA latent cache: one row of ``[latent | rotated k_pe]`` per token and MLA layer."""

from __future__ import annotations

import torch


class MLATokenToKVPool:
    """KV storage of a stack of layers that share slot numbers.

    ``buffer`` is [layers, slots + 1, row]; slot 0 is a dummy that padded rows write and nobody reads for a live token.
    A row is [latent | rotated k_pe]; a dense DSpark drafter's is [key heads | value heads]. Target and drafter own one
    pool each and use the same slot numbers.
    """

    def __init__(self, layer_ids: tuple[int, ...], num_slots: int, row_dim: int, dtype: torch.dtype, device: str):
        self.layer_ids = layer_ids
        self.num_slots = num_slots
        self.buffer = torch.zeros(len(layer_ids), num_slots + 1, row_dim, dtype=dtype, device=device)
        self._index = {layer_id: i for i, layer_id in enumerate(layer_ids)}

    def layer(self, layer_id: int) -> torch.Tensor:
        """KV rows of one layer, [slots + 1, latent + rope] (a view)."""
        return self.buffer[self._index[layer_id]]

    def nbytes(self) -> int:
        """Bytes held."""
        return self.buffer.nbytes
