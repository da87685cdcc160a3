"""Gated MLA attention over the paged latent cache: expanded form for prefill, absorbed form for everything else."""

from __future__ import annotations

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.layers.attention.base import AttentionBackend, AttentionContext, MLAMetadata
from sgling.srt.layers.linear import FusedLinear, RowParallelLinear
from sgling.srt.layers.norm import RMSNorm
from sgling.srt.layers.rotary import RotaryEmbedding
from sgling.srt.layers.weights import WeightSource
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling_kernel.mla import PagedContext, absorb_q, expand_v, head_gate, mla_decode, mla_prefill, prepare


class MLAAttnBackend(AttentionBackend):
    """Runs latent attention; page-table width comes from a host upper bound, exact lengths stay on the device."""

    needs_cpu_seq_lens = False

    def __init__(self, scale: float):
        self.scale = scale

    def init_forward_metadata_in_graph(self, batch: ForwardBatch, pools: MemoryPools) -> MLAMetadata:
        """Prefill: the slots of the whole prefix and chunk, gathered once for all layers; else the paged context."""
        if batch.mode.is_prefill:
            row = pools.req_to_token.index_select(0, batch.req_pool_indices)[0]
            return MLAMetadata(prefill_locs=row[: batch.prefix_len + batch.width], paged=None)
        paged = PagedContext(pools.req_to_token, batch.req_pool_indices, batch.seq_lens, batch.width, batch.kv_bound)
        return MLAMetadata(prefill_locs=None, paged=paged)

    def forward(
        self,
        queries: tuple[torch.Tensor, torch.Tensor],
        kv_pool: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        metadata: MLAMetadata,
    ) -> torch.Tensor:
        """Attention of rows whose own keys are already written.

        Args:
            queries: (q_nope [N, H, nope], rotated q_pe [N, H, rope]).
            kv_pool: [slots + 1, latent + rope] of the layer.
            weights: (w_kc [H, nope, latent], w_vc [H, latent, v]).

        Returns:
            [N, H, v] in the model dtype.
        """
        (q_nope, q_pe), (w_kc, w_vc) = queries, weights
        if metadata.prefill_locs is not None:
            kv = kv_pool.index_select(0, metadata.prefill_locs)
            return mla_prefill(torch.cat(queries, dim=-1), kv, w_kc, w_vc, batch.prefix_len, self.scale)
        q_lat = absorb_q(q_nope, w_kc)
        if batch.ragged is not None:
            spread = batch.ragged.spread
            dense = self.decode(spread(q_lat), spread(q_pe), kv_pool, metadata.paged)
            return expand_v(batch.ragged.pack(dense), w_vc)
        return expand_v(self.decode(q_lat, q_pe, kv_pool, metadata.paged), w_vc)

    def decode(
        self, q_lat: torch.Tensor, q_pe: torch.Tensor, kv_pool: torch.Tensor, context: PagedContext
    ) -> torch.Tensor:
        """Latent attention of whole windows: q_lat [N, H, latent], rotated q_pe [N, H, rope] -> [N, H, latent]."""
        return mla_decode(q_lat, q_pe, kv_pool, context, self.scale)


class MLAAttention:
    """One gated MLA layer (docs/ling3.md §3.2); heads are sharded, the latent projection is replicated.

    All products of the input are one: rows ``[q_nope | q_pe | k_pe | latent | gate]``, so that the rotated parts lie
    side by side and are rotated in one call. With a query latent the rows are ``[q_latent | k_pe | latent | gate]``.
    """

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        config: ModelConfig,
        layer_id: int,
        shared: tuple[RotaryEmbedding, MLAAttnBackend],
    ):
        self.layer_id = layer_id
        self.rotary, self.backend = shared
        _, self.heads = source.parallel.shard(config.num_attention_heads)
        self.nope, self.rope, self.latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        self._load_query(source, prefix, config)
        self.kv_a_layernorm = RMSNorm(source, f"{prefix}.kv_a_layernorm.weight", config.rms_norm_eps)
        kv_b = source.shard(f"{prefix}.kv_b_proj.weight", dim=0).view(self.heads, -1, self.latent)
        self.w_kc = kv_b[:, : self.nope].contiguous()
        self.w_vc = kv_b[:, self.nope :].transpose(1, 2).contiguous()
        self.dense = RowParallelLinear(source, f"{prefix}.dense.weight")

    def _load_query(self, source: WeightSource, prefix: str, config: ModelConfig) -> None:
        """Fuse the query projection (or its latent) with kv_a and the head gate, rotated rows side by side."""
        kv_a = source.full(f"{prefix}.kv_a_proj_with_mqa.weight")
        gate = source.shard(f"{prefix}.g_proj.weight", dim=0)
        tail = [kv_a[self.latent :], kv_a[: self.latent], gate]
        tail_sizes = (self.rope, self.latent, self.heads)
        self.q_b_proj = None
        if config.q_lora_rank is None:
            self.in_proj = FusedLinear([*self._split_query_rows(source.shard(f"{prefix}.q_proj.weight", dim=0)), *tail])
            pe = (self.heads + 1) * self.rope
            self.sizes = (self.heads * self.nope, pe, *tail_sizes[1:])
            return
        self.in_proj = FusedLinear([source.full(f"{prefix}.q_a_proj.weight"), *tail])
        self.sizes = (config.q_lora_rank, *tail_sizes)
        self.q_a_layernorm = RMSNorm(source, f"{prefix}.q_a_layernorm.weight", config.rms_norm_eps)
        self.q_b_proj = FusedLinear(self._split_query_rows(source.shard(f"{prefix}.q_b_proj.weight", dim=0)))

    def _split_query_rows(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Head-major rows [H * (nope + rope), in] -> the nope rows of all heads, the rope rows of all heads."""
        by_head = weight.view(self.heads, self.nope + self.rope, -1)
        return [by_head[:, : self.nope].flatten(0, 1), by_head[:, self.nope :].flatten(0, 1)]

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x -> (q_nope [N, H, nope], unrotated [q_pe | k_pe] [N, H + 1, rope], latent [N, latent], gate [N, H])."""
        first, pe, latent, gate = self.in_proj.forward(x).split(self.sizes, dim=-1)
        if self.q_b_proj is None:
            q_nope = first
        else:
            queries = self.q_b_proj.forward(self.q_a_layernorm.forward(first))
            q_nope, q_pe = queries.split((self.heads * self.nope, self.heads * self.rope), dim=-1)
            pe = torch.cat((q_pe, pe), dim=-1)
        return q_nope.unflatten(-1, (self.heads, self.nope)), pe.unflatten(-1, (-1, self.rope)), latent, gate

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [N, H] after the input norm -> [N, H], reduced over ranks; writes the rows' own KV first."""
        batch = context.batch
        q_nope, pe, latent, gate = self._project(x)
        kv_pool = context.kv.layer(self.layer_id)
        norm = (self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)
        rotary = (batch.positions, self.rotary.table)
        q_pe = prepare(pe, latent, norm, rotary, (kv_pool, batch.out_cache_loc))
        out = self.backend.forward((q_nope, q_pe), kv_pool, (self.w_kc, self.w_vc), batch, context.mla)
        return self.dense.forward(head_gate(out, gate))
