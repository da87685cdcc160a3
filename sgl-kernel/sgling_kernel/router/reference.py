"""Group-limited top-k routing, plain torch (docs/ling3.md §3.3)."""

from typing import NamedTuple

import torch
from torch import Tensor

from sgling_kernel.linear import reference as linear
from sgling_kernel.norm import reference as norm
from sgling_kernel.pointwise import sigmoid

SUM_EPS = 1e-20


class RouterConfig(NamedTuple):
    """Static routing parameters of one MoE layer."""

    n_group: int
    topk_group: int
    top_k: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    def check(self, num_experts: int) -> None:
        """Raise ValueError unless num_experts splits into n_group groups that can fill top_k slots."""
        if self.n_group < 1 or num_experts % self.n_group:
            raise ValueError(f"{num_experts} experts do not split into {self.n_group} groups")
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group {self.topk_group} is outside 1..{self.n_group}")
        if not 1 <= self.top_k <= self.topk_group * (num_experts // self.n_group):
            raise ValueError(f"top_k {self.top_k} does not fit into {self.topk_group} groups of {num_experts} experts")


def add_rms_norm_router(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, router_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What an MoE layer does before it routes: residual add, norm and the router's product.

    x, residual [N, d], norm_weight [d], router_weight [E, d] -> (normed [N, d] and new residual [N, d] in the dtype of
    x, logits fp32 [N, E] of the rounded normed rows). Source: docs/ling3.md §3.0, §3.3.
    """
    normed, new_residual = norm.fused_add_rms_norm(x, residual, norm_weight, eps)
    return normed, new_residual, linear.linear_fp32(normed, router_weight)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest entries of the last dimension, largest first, lowest index first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def grouped_topk(logits: Tensor, bias: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """Choose top_k experts per row by biased score, weigh them by unbiased score.

    logits fp32 [N, E], bias fp32 [E] -> (weights fp32 [N, top_k], ids int64 [N, top_k]), best biased score first;
    the weights include routed_scaling_factor. Groups are contiguous blocks of E / n_group experts; a group scores the
    sum of its two largest biased scores (one, if it has one expert); experts of dropped groups are -inf. Lowest id
    wins every tie, between groups and between experts. Raises ValueError for a config that does not fit E.
    """
    num_rows, num_experts = logits.shape
    config.check(num_experts)
    scores = sigmoid(logits)
    biased = scores + bias
    if config.topk_group < config.n_group:
        by_group = biased.view(num_rows, config.n_group, -1)
        group_scores = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
        dropped = torch.ones_like(group_scores, dtype=torch.bool)
        dropped.scatter_(1, _largest(group_scores, config.topk_group), False)
        biased = by_group.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    ids = _largest(biased, config.top_k)
    weights = scores.gather(1, ids)
    if config.norm_topk_prob:
        weights.div_(weights.sum(-1, keepdim=True).add_(SUM_EPS))
    return weights.mul_(config.routed_scaling_factor), ids
