"""KDA state of running requests: recurrent matrix, conv window, and the rollback store of the last verify.

Slot 0 of every tensor is a dummy; padded rows read and write only there. A state slot is not a request row: the
indirection (``FutureMap.state_slot``) lets a prefix checkpoint own a slot without owning a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling_kernel.kda import ReplayRing, StagedBuffers


class LinearStateShape(NamedTuple):
    """Sizes of one rank's KDA state.

    Attributes:
        layer_ids: KDA layer numbers, in order.
        num_heads: local heads.
        head_dim: key dim = value dim.
        conv_window: stored pre-conv rows (conv width - 1).
    """

    layer_ids: tuple[int, ...]
    num_heads: int
    head_dim: int
    conv_window: int

    @property
    def channels(self) -> int:
        """Conv channels: q, k and v of every local head."""
        return 3 * self.num_heads * self.head_dim


class LinearStatePool:
    """Working states [layers, slots + 1, ...]: ``conv`` in the model dtype, ``temporal`` in fp32 ([.., H, V, K])."""

    def __init__(self, shape: LinearStateShape, num_slots: int, dtype: torch.dtype, device: str):
        layers, heads, dim = len(shape.layer_ids), shape.num_heads, shape.head_dim
        self.shape = shape
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self.conv = torch.zeros(layers, num_slots + 1, shape.conv_window, shape.channels, dtype=dtype, device=device)
        self.temporal = torch.zeros(layers, num_slots + 1, heads, dim, dim, dtype=torch.float32, device=device)

    def clear(self, slot: int) -> None:
        """Zero one slot: the state of a request before its first token."""
        self.conv[:, slot].zero_()
        self.temporal[:, slot].zero_()

    def nbytes(self) -> int:
        """Bytes held by the working states."""
        return self.conv.nbytes + self.temporal.nbytes


def staged_buffers(pool: LinearStatePool, width: int) -> StagedBuffers:
    """Rollback store of the ``staged`` scheme: the post-state of each of the W rows, [layers, slots + 1, W, ...]."""
    shape = pool.shape
    lead = (len(shape.layer_ids), pool.num_slots + 1, width)
    heads, dim = shape.num_heads, shape.head_dim
    return StagedBuffers(
        conv=torch.zeros(*lead, shape.conv_window, shape.channels, dtype=pool.dtype, device=pool.device),
        state=torch.zeros(*lead, heads, dim, dim, dtype=torch.float32, device=pool.device),
    )


def replay_ring(pool: LinearStatePool, ring: int) -> ReplayRing:
    """Rollback store of the ``replay`` scheme: inputs of each row at position p in entry ``p & (ring - 1)``."""
    shape = pool.shape
    lead = (len(shape.layer_ids), pool.num_slots + 1, ring)
    heads, dim = shape.num_heads, shape.head_dim

    def zeros(*tail: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*lead, *tail, dtype=dtype, device=pool.device)

    return ReplayRing(
        x=zeros(shape.channels, dtype=pool.dtype),
        k=zeros(heads, dim, dtype=pool.dtype),
        v=zeros(heads, dim, dtype=pool.dtype),
        g=zeros(heads, dim, dtype=torch.float32),
        beta=zeros(heads, dtype=torch.float32),
    )
