"""The attention backend of a hybrid model: one child for full attention (MLA), one for linear attention (KDA)."""

from __future__ import annotations

from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.layers.attention.base import AttentionBackend, AttentionContext
from sgling.srt.layers.attention.kda import KDAAttnBackend
from sgling.srt.layers.attention.mla import MLAAttnBackend
from sgling.srt.mem_cache.memory_pools import MemoryPools


class HybridLinearAttnBackend(AttentionBackend):
    """Prepares both children; one child that needs host lengths makes the whole model need them."""

    def __init__(self, full: MLAAttnBackend, linear: KDAAttnBackend):
        self.full = full
        self.linear = linear

    @property
    def parts(self) -> tuple[AttentionBackend, ...]:
        """The children."""
        return self.full, self.linear

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """OR over the children."""
        return self.full.needs_cpu_seq_lens or self.linear.needs_cpu_seq_lens

    def init_forward_metadata_in_graph(self, batch: ForwardBatch, pools: MemoryPools) -> AttentionContext:
        """Context of a target forward: the target's cache, MLA metadata, KDA layer states."""
        return AttentionContext(
            batch=batch,
            kv=pools.kv,
            mla=self.full.init_forward_metadata_in_graph(batch, pools),
            kda=self.linear.init_forward_metadata_in_graph(batch, pools),
        )
