"""KDA attention: fused input projection, the recurrence on the request's state, gated norm, output projection."""

from __future__ import annotations

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode
from sgling.srt.layers.attention.base import AttentionBackend, AttentionContext, KDALayerState
from sgling.srt.layers.linear import FusedLinear, RowParallelLinear
from sgling.srt.layers.weights import WeightSource
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling_kernel.kda import (
    KDAParams,
    ReplayRing,
    StagedBuffers,
    kda_decode,
    kda_extend,
    kda_verify_replay,
    kda_verify_staged,
)


class KDAAttnBackend(AttentionBackend):
    """Runs the delta-rule recurrence in the form each forward mode asks for; reads lengths on the device only."""

    needs_cpu_seq_lens = False

    def init_forward_metadata_in_graph(self, batch: ForwardBatch, pools: MemoryPools) -> tuple[KDALayerState, ...]:
        """Views of every layer's state; the rollback store is looked up for verify only."""
        state = pools.state
        if batch.mode is not ForwardMode.TARGET_VERIFY:
            return tuple(map(KDALayerState, state.conv.unbind(), state.temporal.unbind(), (None,) * len(state.conv)))
        if pools.rollback is None:
            raise ValueError("a verify forward needs pools with a rollback store")
        store = type(pools.rollback)
        rollback = map(store, *(tensor.unbind() for tensor in pools.rollback))
        return tuple(map(KDALayerState, state.conv.unbind(), state.temporal.unbind(), rollback))

    def forward(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        params: KDAParams,
        batch: ForwardBatch,
        state: KDALayerState,
    ) -> torch.Tensor:
        """Recurrence over the rows of a forward.

        Args:
            inputs: (qkv [N, 3*H*K] before the convolution, f [N, H*K], b [N, H]).
            params: constants of the layer.
            batch: EXTEND and DECODE update the working state; TARGET_VERIFY writes the rollback store only.
            state: the layer's pools.

        Returns:
            [N, H, V] in the model dtype.

        Raises:
            ValueError: a draft mode (the NEXTN layer has no KDA).
        """
        qkv, f, b = inputs
        slots = batch.state_slots
        if batch.mode is ForwardMode.DECODE:
            return kda_decode(qkv, f, b, params, state.conv, state.temporal, slots)
        if batch.mode is ForwardMode.EXTEND:
            return kda_extend(qkv, f, b, params, state.conv, state.temporal, slots)
        if batch.mode is not ForwardMode.TARGET_VERIFY:
            raise ValueError(f"KDA layers do not run in mode {batch.mode}")
        if batch.ragged is None:
            return self._verify(inputs, params, batch, state)
        dense = self._verify(tuple(map(batch.ragged.spread, inputs)), params, batch, state)
        return batch.ragged.pack(dense)

    @staticmethod
    def _verify(
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        params: KDAParams,
        batch: ForwardBatch,
        state: KDALayerState,
    ) -> torch.Tensor:
        """Whole windows of W rows; what it leaves for rows that were cut is never committed."""
        working = (state.conv, state.temporal, batch.state_slots)
        if isinstance(state.rollback, StagedBuffers):
            return kda_verify_staged(*inputs, params, *working, batch.width, state.rollback)
        assert isinstance(state.rollback, ReplayRing)
        return kda_verify_replay(*inputs, params, *working, batch.seq_lens, batch.width, state.rollback)


class KDAAttention:
    """One KDA layer (docs/ling3.md §3.1); heads are sharded over ranks.

    The input projection is one product with rows ``[q | k | v | b | f | g]``, each sharded by head before joining.
    """

    def __init__(self, source: WeightSource, prefix: str, config: ModelConfig, kda_index: int, backend: KDAAttnBackend):
        _, heads = source.parallel.shard(config.num_attention_heads)
        width = heads * config.head_dim
        self.backend = backend
        self.kda_index = kda_index
        self.sizes = (3 * width, heads, width, width)
        self.eps = config.rms_norm_eps
        self.in_proj = FusedLinear([source.shard(f"{prefix}.{leaf}_proj.weight", dim=0) for leaf in "qkvbfg"])
        self.params = KDAParams(
            conv_weight=torch.cat(
                [source.shard(f"{prefix}.{leaf}_conv1d.weight", dim=0, dtype=torch.float32)[:, 0] for leaf in "qkv"]
            ),
            a_log=source.shard(f"{prefix}.A_log", dim=0, dtype=torch.float32),
            dt_bias=source.shard(f"{prefix}.dt_bias", dim=0, dtype=torch.float32).view(heads, config.head_dim),
            lower_bound=config.kda_lower_bound,
        )
        self.o_norm = source.full(f"{prefix}.o_norm.weight")
        self.o_proj = RowParallelLinear(source, f"{prefix}.o_proj.weight")

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [N, H] after the input norm -> [N, H], reduced over ranks."""
        qkv, b, f, gate = self.in_proj.forward(x).split(self.sizes, dim=-1)
        out = self.backend.forward((qkv, f, b), self.params, context.batch, context.kda[self.kda_index])
        return self.o_proj.forward_gated(out, gate, self.o_norm, self.eps)
