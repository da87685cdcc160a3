"""Attention of a DSpark drafter layer: block rows over projected target features and each other.

Two kinds: grouped-query attention with normalised query and key heads, and Ling's gated MLA in its absorbed form. In
both, the keys and values of the context come from target features through the very weights that serve block rows.
"""

from __future__ import annotations

import torch

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.layers.attention.base import AttentionBackend
from sgling.srt.layers.attention.block_kv import DenseCache, LatentCache
from sgling.srt.layers.linear import FusedLinear, RowParallelLinear
from sgling.srt.layers.weights import WeightSource
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling_kernel.block_attention import block_attention, prepare_heads, prepare_latent
from sgling_kernel.mla import PagedContext, absorb_q, expand_v, head_gate


class BlockAttnBackend(AttentionBackend):
    """Plan-free block attention; lengths stay on the device."""

    needs_cpu_seq_lens = False

    def init_forward_metadata_in_graph(self, batch: ForwardBatch, pools: MemoryPools) -> PagedContext:
        """Page tables and lengths, shared by all layers."""
        return PagedContext(pools.req_to_token, batch.req_pool_indices, batch.seq_lens, batch.width, batch.kv_bound)

    def forward(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        context: PagedContext,
        visibility: tuple[bool, int | None],
        scale: float,
    ) -> torch.Tensor:
        """See :func:`block_attention`; ``visibility`` = (causal, window) of the layer."""
        return block_attention(q, keys, values, context, *visibility, scale)


class DenseBlockAttention:
    """Grouped-query attention; heads are sharded. The layer's cache rows are [key heads | value heads]."""

    def __init__(
        self,
        source: WeightSource,
        config: DSparkConfig,
        layer_id: int,
        shared: tuple[DenseCache, BlockAttnBackend],
    ):
        self.cache, self.backend = shared
        self.layer_id, self.visibility = layer_id, tuple(config.layers[layer_id])
        self.head_dim = config.attention.head_dim
        prefix = f"layers.{layer_id}.self_attn"
        self.in_proj = FusedLinear([source.shard(f"{prefix}.q_proj.weight", dim=0), self.cache.layers[layer_id]])
        self.norms = (source.full(f"{prefix}.q_norm.weight"), self.cache.norm[layer_id, None], self.cache.eps)
        self.o_proj = RowParallelLinear(source, f"{prefix}.o_proj.weight")

    def forward(
        self, x: torch.Tensor, caches: torch.Tensor, batch: ForwardBatch, context: PagedContext
    ) -> torch.Tensor:
        """x [N, d] after the input norm -> [N, d], reduced; the rows' own entries are written to ``caches`` first."""
        mine = caches[self.layer_id, None]
        heads = self.in_proj.forward(x).unsqueeze(1)
        rotary = self.cache.rotary.at(batch.positions)
        q = prepare_heads(heads, self.norms, rotary, (mine, batch.out_cache_loc))
        keys, values = mine[0].unflatten(-1, (2, -1, self.head_dim)).unbind(1)
        out = self.backend.forward(q, keys, values, context, self.visibility, self.head_dim**-0.5)
        return self.o_proj.forward(out.flatten(1))


class LatentBlockAttention:
    """Ling's gated MLA; heads are sharded, cache rows are [latent | rotated key] on every rank.

    All products of the input are one, rows ``[q_nope | q_pe | k_pe | latent | gate]``, as in the target's layers.
    """

    def __init__(
        self,
        source: WeightSource,
        config: DSparkConfig,
        layer_id: int,
        shared: tuple[LatentCache, BlockAttnBackend],
    ):
        self.cache, self.backend = shared
        self.layer_id, self.visibility = layer_id, tuple(config.layers[layer_id])
        shape, prefix = config.attention, f"layers.{layer_id}.self_attn"
        _, self.heads = source.parallel.shard(shape.heads)
        self.nope, self.rope, self.latent = shape.nope, shape.rope, shape.latent
        self.scale = (shape.nope + shape.rope) ** -0.5
        by_head = source.shard(f"{prefix}.q_proj.weight", dim=0).view(self.heads, self.nope + self.rope, -1)
        queries = [by_head[:, : self.nope].flatten(0, 1), by_head[:, self.nope :].flatten(0, 1)]
        gate = source.shard(f"{prefix}.g_proj.weight", dim=0)
        self.in_proj = FusedLinear([*queries, self.cache.layers[layer_id], gate])
        kv_b = source.shard(f"{prefix}.kv_b_proj.weight", dim=0).view(self.heads, -1, self.latent)
        self.w_kc = kv_b[:, : self.nope].contiguous()
        self.w_vc = kv_b[:, self.nope :].transpose(1, 2).contiguous()
        self.o_proj = RowParallelLinear(source, f"{prefix}.o_proj.weight")

    def forward(
        self, x: torch.Tensor, caches: torch.Tensor, batch: ForwardBatch, context: PagedContext
    ) -> torch.Tensor:
        """See :meth:`DenseBlockAttention.forward`."""
        sizes = (self.heads * self.nope, (self.heads + 1) * self.rope, self.latent, self.heads)
        q_nope, pe, latent, gate = self.in_proj.forward(x).split(sizes, dim=-1)
        mine = caches[self.layer_id, None]
        q_pe = prepare_latent(
            pe.unflatten(-1, (1, -1, self.rope)),
            latent.unsqueeze(1),
            (self.cache.norm[self.layer_id, None], self.cache.eps),
            self.cache.rotary.at(batch.positions),
            (mine, batch.out_cache_loc),
        )
        q = torch.cat((absorb_q(q_nope.unflatten(-1, (self.heads, -1)), self.w_kc), q_pe), dim=-1)
        keys = mine[0].unsqueeze(1)
        values = keys[..., : self.latent]
        attended = self.backend.forward(q, keys, values, context, self.visibility, self.scale)
        return self.o_proj.forward(head_gate(expand_v(attended, self.w_vc), gate))
