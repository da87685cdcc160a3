"""Gated MLA attention over the paged latent cache: expanded form for prefill, absorbed form for everything else."""

from __future__ import annotations

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode
from sgling.srt.layers.attention.base import AttentionBackend, AttentionContext, MLAMetadata
from sgling.srt.layers.linear import FusedLinear, RowParallelLinear
from sgling.srt.layers.norm import RMSNorm
from sgling.srt.layers.rotary import RotaryEmbedding
from sgling.srt.layers.weights import WeightSource
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling_kernel.mla import (
    PagedContext,
    head_gate,
    mla_decode_gated,
    mla_prefill,
    prepare,
    prepare_absorbed,
)
from sgling_kernel.relay import take_accepted


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
        table = (pools.req_to_token, batch.req_pool_indices, batch.seq_lens)
        paged = PagedContext(*table, batch.width, batch.kv_bound, early=True)
        return MLAMetadata(prefill_locs=None, paged=paged)

    def prefill(
        self,
        queries: torch.Tensor,
        kv_pool: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        metadata: MLAMetadata,
    ) -> torch.Tensor:
        """Expanded attention of a prompt chunk whose own keys are already written.

        ``queries`` [T, H, nope + rope] with rotated rope part, ``kv_pool`` [slots + 1, latent + rope] of the layer,
        ``weights`` (w_kc [H, nope, latent], w_vc [H, latent, v]) -> [T, H, v] in the model dtype.
        """
        kv = kv_pool.index_select(0, metadata.prefill_locs)
        return mla_prefill(queries, kv, *weights, batch.prefix_len, self.scale)

    def attend(
        self,
        queries: tuple[torch.Tensor, torch.Tensor],
        kv_pool: torch.Tensor,
        output: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        context: PagedContext,
    ) -> torch.Tensor:
        """Absorbed attention of rows whose own keys are already written, up to the gated values.

        Args:
            queries: (absorbed [N, H, latent], rotated [N, H, rope]).
            kv_pool: [slots + 1, latent + rope] of the layer.
            output: (w_vc [H, latent, v], gate logits [N, H]).

        Returns:
            [N, H * v] in the model dtype.
        """
        if batch.ragged is None:
            return self.decode_gated(queries, kv_pool, output, context)
        spread, (q_lat, q_pe), (w_vc, gate) = batch.ragged.spread, queries, output
        dense = self.decode_gated((spread(q_lat), spread(q_pe)), kv_pool, (w_vc, spread(gate)), context)
        return batch.ragged.pack(dense)

    def decode_gated(
        self,
        queries: tuple[torch.Tensor, torch.Tensor],
        kv_pool: torch.Tensor,
        output: tuple[torch.Tensor, torch.Tensor],
        context: PagedContext,
    ) -> torch.Tensor:
        """:meth:`attend` for whole windows: the one form of attention that decode, verify and packed verify share."""
        w_vc, gate = output
        return mla_decode_gated(*queries, kv_pool, context, self.scale, w_vc, gate)


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
        batch, kv_pool = context.batch, context.kv.layer(self.layer_id)
        q_nope, pe, latent, gate = self._project(x)
        if context.mla.paged is None:
            q_pe = prepare(pe, latent, *self._preparation(batch, kv_pool))
            queries = torch.cat((q_nope, q_pe), dim=-1)
            out = self.backend.prefill(queries, kv_pool, (self.w_kc, self.w_vc), batch, context.mla)
            return self.dense.forward(head_gate(out, gate))
        queries = prepare_absorbed(q_nope, self.w_kc, pe, latent, *self._preparation(batch, kv_pool))
        return self.dense.forward(self.backend.attend(queries, kv_pool, (self.w_vc, gate), batch, context.mla.paged))

    def forward_accepted(
        self, x: torch.Tensor, residual: torch.Tensor, context: AttentionContext, accept_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`forward` of the last accepted row of each window, and that row of ``residual``: both [bs, H].

        x, residual [bs * W, H], ``accept_lens`` int64 [bs]. All rows leave their KV.
        """
        batch, kv_pool = context.batch, context.kv.layer(self.layer_id)
        q_nope, pe, latent, gate = self._project(x)
        q_lat, q_pe = prepare_absorbed(q_nope, self.w_kc, pe, latent, *self._preparation(batch, kv_pool))
        rows = (q_lat, q_pe, gate, residual, batch.positions)
        q_lat, q_pe, gate, residual, last = take_accepted(rows, accept_lens, batch.width)
        one = batch._replace(mode=ForwardMode.DRAFT_DECODE, width=1, positions=last, seq_lens=last)
        paged = context.mla.paged._replace(seq_lens=last, width=1, early=False)
        attended = self.backend.attend((q_lat, q_pe), kv_pool, (self.w_vc, gate), one, paged)
        return self.dense.forward(attended), residual

    def _preparation(self, batch: ForwardBatch, kv_pool: torch.Tensor) -> tuple:
        """(norm, rotary, cache) of :func:`sgling_kernel.mla.prepare`."""
        norm = (self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)
        return norm, (batch.positions, self.rotary.table), (kv_pool, batch.out_cache_loc)
