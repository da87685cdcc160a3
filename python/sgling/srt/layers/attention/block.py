"""Attention of a DSpark drafter layer: block rows over projected target features and each other.

Two kinds: grouped-query attention with normalised query and key heads, and Ling's gated MLA in its absorbed form. In
both, the keys and values of the context come from target features through the very weights that serve block rows.
"""

from __future__ import annotations

import torch

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.layers.attention.base import AttentionBackend
from sgling.srt.layers.attention.block_kv import BlockRotary
from sgling.srt.layers.linear import FusedLinear, RowParallelLinear
from sgling.srt.layers.norm import RMSNorm
from sgling.srt.layers.weights import WeightSource
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling_kernel.block_attention import block_attention
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
        prefix: str,
        config: DSparkConfig,
        layer_id: int,
        shared: tuple[BlockRotary, BlockAttnBackend],
    ):
        self.rotary, self.backend = shared
        self.visibility = tuple(config.layers[layer_id])
        self.head_dim = config.attention.head_dim
        self.q_proj = FusedLinear([source.shard(f"{prefix}.q_proj.weight", dim=0)])
        self.q_norm = RMSNorm(source, f"{prefix}.q_norm.weight", config.rms_norm_eps)
        self.o_proj = RowParallelLinear(source, f"{prefix}.o_proj.weight")

    def forward(self, x: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, context: PagedContext) -> torch.Tensor:
        """x [N, d] after the input norm, ``cache`` [slots, row] holding the rows' own entries -> [N, d], reduced."""
        q = self.q_norm.forward(self.q_proj.forward(x).unflatten(-1, (-1, self.head_dim)))
        q = self.rotary.forward(q, batch.positions)
        keys, values = cache.unflatten(-1, (2, -1, self.head_dim)).unbind(1)
        out = self.backend.forward(q, keys, values, context, self.visibility, self.head_dim**-0.5)
        return self.o_proj.forward(out.flatten(1))


class LatentBlockAttention:
    """Ling's gated MLA; heads are sharded, cache rows are [latent | rotated key] on every rank."""

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        config: DSparkConfig,
        layer_id: int,
        shared: tuple[BlockRotary, BlockAttnBackend],
    ):
        self.rotary, self.backend = shared
        self.visibility = tuple(config.layers[layer_id])
        shape = config.attention
        _, self.heads = source.parallel.shard(shape.heads)
        self.nope, self.latent = shape.nope, shape.latent
        self.scale = (shape.nope + shape.rope) ** -0.5
        self.q_proj = FusedLinear([source.shard(f"{prefix}.q_proj.weight", dim=0)])
        self.g_proj = FusedLinear([source.shard(f"{prefix}.g_proj.weight", dim=0)])
        kv_b = source.shard(f"{prefix}.kv_b_proj.weight", dim=0).view(self.heads, -1, self.latent)
        self.w_kc = kv_b[:, : self.nope].contiguous()
        self.w_vc = kv_b[:, self.nope :].transpose(1, 2).contiguous()
        self.o_proj = RowParallelLinear(source, f"{prefix}.o_proj.weight")

    def forward(self, x: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, context: PagedContext) -> torch.Tensor:
        """x [N, d] after the input norm, ``cache`` [slots, row] holding the rows' own entries -> [N, d], reduced."""
        queries = self.q_proj.forward(x).unflatten(-1, (self.heads, -1))
        q_nope, q_pe = queries[..., : self.nope], self.rotary.forward(queries[..., self.nope :], batch.positions)
        q = torch.cat((absorb_q(q_nope, self.w_kc), q_pe), dim=-1)
        keys = cache.unsqueeze(1)
        values = keys[..., : self.latent]
        latent = self.backend.forward(q, keys, values, context, self.visibility, self.scale)
        return self.o_proj.forward(head_gate(expand_v(latent, self.w_vc), self.g_proj.forward(x)))
