"""Group-limited top-k in Triton: one program per row, everything in registers; the lowest id wins every tie."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait
from sgling_kernel.router.reference import SUM_EPS, RouterConfig


@triton.jit
def _grouped_topk_kernel(
    logits,
    bias,
    weights,
    ids,
    factor,
    eps,
    E: tl.constexpr,
    G: tl.constexpr,
    PER: tl.constexpr,
    KEEP: tl.constexpr,
    TOP: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, G), tl.arange(0, PER)
    expert = group[:, None] * PER + member[None, :]
    biased = tl.load(bias + expert)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    score = tl.load(logits + row * E + expert)
    score = 1.0 / (1.0 + tl.exp(-score))
    biased += score
    if KEEP < G:
        best, where = tl.max(biased, 1, return_indices=True, return_indices_tie_break_left=True)
        group_score = best
        if PER > 1:
            group_score = best + tl.max(tl.where(member[None, :] == where[:, None], float("-inf"), biased), 1)
        kept = tl.zeros((G,), dtype=tl.int32)
        for _ in range(KEEP):
            chosen = tl.argmax(group_score, 0)
            kept = tl.where(group == chosen, 1, kept)
            group_score = tl.where(group == chosen, float("-inf"), group_score)
        biased = tl.where(kept[:, None] > 0, biased, float("-inf"))
    flat, flat_score = tl.reshape(biased, (E,)), tl.reshape(score, (E,))
    number, slot = tl.arange(0, E), tl.arange(0, TOP_BLOCK)
    picked = tl.zeros((TOP_BLOCK,), dtype=tl.int32)
    weight = tl.zeros((TOP_BLOCK,), dtype=tl.float32)
    for j in range(TOP):
        chosen = tl.argmax(flat, 0)
        picked = tl.where(slot == j, chosen, picked)
        weight = tl.where(slot == j, tl.sum(tl.where(number == chosen, flat_score, 0.0), 0), weight)
        flat = tl.where(number == chosen, float("-inf"), flat)
    if NORM:
        weight = weight / (tl.sum(weight, 0) + eps)
    mask = slot < TOP
    tl.store(weights + row * TOP + slot, weight * factor, mask=mask)
    tl.store(ids + row * TOP + slot, picked.to(tl.int64), mask=mask)


def why_not_kernel(config: RouterConfig, num_experts: int) -> str | None:
    """Reason why the kernel cannot route this config, or None."""
    for name, value in (("experts", num_experts), ("groups", config.n_group)):
        if value & (value - 1):
            return f"{value} {name}: not a power of two"
    return None


def grouped_topk(logits: Tensor, bias: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """reference.grouped_topk for contiguous fp32 logits and power-of-two sizes."""
    rows, experts = logits.shape
    config.check(experts)
    weights = torch.empty(rows, config.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, config.top_k, dtype=torch.int64, device=logits.device)
    _grouped_topk_kernel[(rows,)](
        logits, bias, weights, ids, config.routed_scaling_factor, SUM_EPS,
        E=experts, G=config.n_group, PER=experts // config.n_group, KEEP=config.topk_group, TOP=config.top_k,
        TOP_BLOCK=triton.next_power_of_2(config.top_k), NORM=config.norm_topk_prob, num_warps=1, **launch_pdl(logits),
    )  # fmt: skip
    return weights, ids
