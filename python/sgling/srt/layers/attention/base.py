"""What every attention backend declares and prepares, and what attention layers receive with each forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.mem_cache.kv_pool import MLATokenToKVPool
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling_kernel.kda import ReplayRing, StagedBuffers
from sgling_kernel.mla import PagedContext


class MLAMetadata(NamedTuple):
    """Where MLA layers find keys; exactly one field is set.

    Attributes:
        prefill_locs: int64 [prefix + T], KV slots of the request's positions 0 .. prefix + T - 1 (prefill).
        paged: page tables and lengths (decode, verify and draft).
    """

    prefill_locs: torch.Tensor | None
    paged: PagedContext | None


class KDALayerState(NamedTuple):
    """One KDA layer's part of the state pools (views).

    Attributes:
        conv: [S, 3, C] pre-conv rows, model dtype.
        temporal: fp32 [S, H, V, K].
        rollback: where verify leaves what commit needs, None when nothing is ever verified.
    """

    conv: torch.Tensor
    temporal: torch.Tensor
    rollback: StagedBuffers | ReplayRing | None


class AttentionContext(NamedTuple):
    """One forward as attention layers see it.

    Attributes:
        batch: rows of the forward.
        kv: latent cache of the model that runs (target or NEXTN).
        mla: shared by all MLA layers.
        kda: one entry per KDA layer in layer order; empty for the NEXTN layer.
    """

    batch: ForwardBatch
    kv: MLATokenToKVPool
    mla: MLAMetadata
    kda: tuple[KDALayerState, ...]


class AttentionBackend(ABC):
    """A way to run one kind of attention.

    ``needs_cpu_seq_lens``: whether a forward needs exact lengths on the host, which costs one blocking device read per
    step. It is True until a backend declares otherwise; the engine ORs it over all backends in use.
    """

    needs_cpu_seq_lens: bool = True

    @abstractmethod
    def init_forward_metadata_in_graph(self, batch: ForwardBatch, pools: MemoryPools) -> object:
        """Metadata of one forward: pure device work on batch and pool tensors, so a graph may record it."""
