"""Feed-forward layers: dense SwiGLU and group-routed experts with a shared expert, each with its own clamp."""

from __future__ import annotations

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.layers.norm import RMSNorm
from sgling.srt.layers.weights import WeightSource
from sgling_kernel.linear import pack_weight
from sgling_kernel.moe import (
    ExpertOutputs,
    ExpertWeights,
    combine,
    dense_ffn,
    empty_experts,
    experts_with_shared,
    interleave_w13,
)
from sgling_kernel.router import RouterConfig, add_rms_norm_router, grouped_topk


def load_ffn(source: WeightSource, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's (w13 [2I, d] with gate and up rows interleaved, w2 [d, I]) of one FFN or expert."""
    gate = source.shard(f"{prefix}.gate_proj.weight", dim=0)
    up = source.shard(f"{prefix}.up_proj.weight", dim=0)
    return interleave_w13(gate[None], up[None])[0], source.shard(f"{prefix}.down_proj.weight", dim=1)


class DenseMLP:
    """SwiGLU FFN, width sharded; never clamped in this model family."""

    def __init__(self, source: WeightSource, prefix: str):
        self.parallel = source.parallel
        self.w13, self.w2 = map(pack_weight, load_ffn(source, prefix))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, d] -> [N, d], reduced over ranks."""
        return self.parallel.all_reduce(dense_ffn(x, self.w13, self.w2, None))

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """(:meth:`forward` of the normed sum, x + residual), both [N, d]."""
        normed, residual = norm.forward_add(x, residual)
        return self.forward(normed), residual


class SparseMoE:
    """Sigmoid router, top-k routed experts, one always-on shared expert (docs/ling3.md §3.3, §3.4).

    The router is replicated; experts are sharded by width. The routed and the shared clamp of a layer differ, so the
    shared expert is never treated as one more routed expert.
    """

    def __init__(self, source: WeightSource, prefix: str, config: ModelConfig, layer_id: int):
        self.parallel = source.parallel
        self.router = RouterConfig(
            n_group=config.n_group,
            topk_group=config.topk_group,
            top_k=config.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )
        self.gate = source.full(f"{prefix}.gate.weight")
        self.expert_bias = source.full(f"{prefix}.gate.expert_bias", dtype=torch.float32)
        self.experts = ExpertWeights(*self._load_experts(source, prefix, config), config.routed_limit(layer_id))
        self.shared = ExpertWeights(*load_ffn(source, f"{prefix}.shared_experts"), config.shared_limit(layer_id))

    @staticmethod
    def _load_experts(source: WeightSource, prefix: str, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
        experts, hidden = config.num_experts, config.hidden_size
        _, width = source.parallel.shard(config.moe_intermediate_size)
        w13 = empty_experts((experts, 2 * width, hidden), source.dtype, source.device)
        w2 = empty_experts((experts, hidden, width), source.dtype, source.device)
        for expert in range(experts):
            w13[expert], w2[expert] = load_ffn(source, f"{prefix}.experts.{expert}")
        return w13, w2

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor | ExpertOutputs, torch.Tensor]:
        """(scaled routed sum plus shared expert of the normed sum, x + residual), both [N, d], reduced over ranks.

        Norm and router logits may be one node; x may come from the node before, residual must be older
        (``add_rms_norm_router``). On one rank the sum over experts may stay open: the next norm, which adds the output
        to the stream, finishes it.
        """
        normed, residual, logits = add_rms_norm_router(x, residual, norm.weight, norm.eps, self.gate)
        weights, ids = grouped_topk(logits, self.expert_bias, self.router)
        outputs = experts_with_shared(normed, self.experts, self.shared, weights, ids)
        return outputs if self.parallel.size == 1 else self.parallel.all_reduce(combine(outputs)), residual
