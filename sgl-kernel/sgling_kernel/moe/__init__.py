"""Feed-forward operators: routed experts, dense and shared FFN, clamped SwiGLU."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.linear import fixed_row_count, linear
from sgling_kernel.moe import cuda, reference
from sgling_kernel.moe.cpu import (
    empty_experts,
    experts_by_bag,
    experts_by_row,
    experts_grouped,
    why_not_bags,
    why_not_grouped,
)
from sgling_kernel.moe.outputs import ExpertOutputs
from sgling_kernel.moe.reference import interleave_w13
from sgling_kernel.moe.weights import ExpertWeights
from sgling_kernel.norm import fused_add_rms_norm

__all__ = [
    "ExpertOutputs",
    "ExpertWeights",
    "combine",
    "combine_add_rms_norm",
    "dense_ffn",
    "empty_experts",
    "experts_with_shared",
    "interleave_w13",
    "moe_experts",
    "swiglu",
    "why_not_bags",
    "why_not_grouped",
]

_FEW_PAIRS = 4  # up to here copying expert weights beats the grouped product's fixed cost
_BAG_PAIRS_PER_EXPERT = 4  # up to here summing weight columns beats the grouped product


def swiglu(gu: Tensor, limit: float | None) -> Tensor:
    """Clamped SwiGLU of interleaved pairs; see reference.swiglu."""
    if dispatch.use_triton(gu) and gu.dim() == 2:
        from sgling_kernel.moe import kernel

        if dispatch.usable("moe.swiglu", cuda.why_not_swiglu(gu)):
            return cuda.swiglu(gu, limit)
        return kernel.swiglu(gu, limit)
    return reference.swiglu(gu, limit)


def dense_ffn(x: Tensor, w13: Tensor, w2: Tensor, limit: float | None) -> Tensor:
    """Dense or shared FFN; see reference.dense_ffn."""
    return linear(swiglu(linear(x, w13), limit), w2)


def experts_with_shared(
    x: Tensor, experts: ExpertWeights, shared: ExpertWeights, weights: Tensor, ids: Tensor
) -> Tensor | ExpertOutputs:
    """``moe_experts`` plus the always-on shared expert, each rounded on its own: x [N, d] -> [N, d].

    Where the CUDA kernels serve, the sum over slots is left open: ``combine_add_rms_norm`` or ``combine`` takes it.
    """
    if dispatch.use_triton(x):
        from sgling_kernel.moe import gpu, kernel

        if not dispatch.is_decode_sized(x.shape[0]):
            if dispatch.usable("moe.grouped", gpu.why_not_grouped(x)):
                return gpu.experts_grouped(x, experts, weights, ids, dense_ffn(x, *shared))
        elif dispatch.usable("moe.cuda", cuda.why_not_experts(x, experts, shared, ids)):
            return cuda.expert_outputs(x, experts, shared, weights, ids)
        elif dispatch.usable("moe.pairs", kernel.why_not_pairs(x, experts, shared)):
            return kernel.experts_by_pair(x, experts, shared, weights, ids)
    return moe_experts(x, experts.w13, experts.w2, weights, ids, experts.limit) + dense_ffn(x, *shared)


def combine(outputs: Tensor | ExpertOutputs) -> Tensor:
    """The finished output [N, d] of ``experts_with_shared``; see reference.combine."""
    return cuda.combine(outputs) if isinstance(outputs, ExpertOutputs) else outputs


def combine_add_rms_norm(outputs: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, new residual) of the finished output plus the residual; see reference.combine_add_rms_norm."""
    if dispatch.usable("moe.finish", cuda.why_not_finish(residual, weight)):
        return cuda.combine_add_rms_norm(outputs, residual, weight, eps)
    return fused_add_rms_norm(combine(outputs), residual, weight, eps)


def moe_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float | None) -> Tensor:
    """Sum over a row's experts of weight * expert(x); see reference.moe_experts for shapes and rounding.

    CPU: decode-sized batches and fixed-row mode sum weight columns in bags, larger batches go grouped by expert. Where
    `why_not_bags` refuses, few pairs, fixed-row mode and what `why_not_grouped` refuses go row by row.
    GPU: decode-sized batches go pair by pair, prefill chunks through the library's grouped product where it exists.
    """
    if dispatch.use_triton(x):
        return _moe_experts_gpu(x, ExpertWeights(w13, w2, limit), weights, ids)
    pairs, fixed = ids.numel(), fixed_row_count() is not None
    bag_sized = fixed or pairs <= _BAG_PAIRS_PER_EXPERT * w13.shape[0]
    if bag_sized and dispatch.usable("moe.bags", why_not_bags(x, w13, w2)):
        return experts_by_bag(x, w13, w2, weights, ids, limit)
    few = fixed or pairs <= _FEW_PAIRS
    by_row = few or not dispatch.usable("moe.grouped", why_not_grouped(x, w13, w2))
    experts = experts_by_row if by_row else experts_grouped
    return experts(x, w13, w2, weights, ids, limit)


def _moe_experts_gpu(x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor) -> Tensor:
    from sgling_kernel.moe import gpu, kernel

    if not dispatch.is_decode_sized(x.shape[0]) and dispatch.usable("moe.grouped", gpu.why_not_grouped(x)):
        return gpu.experts_grouped(x, experts, weights, ids)
    if dispatch.is_decode_sized(x.shape[0]) and dispatch.usable(
        "moe.cuda", cuda.why_not_experts(x, experts, None, ids)
    ):
        return cuda.combine(cuda.expert_outputs(x, experts, None, weights, ids))
    if dispatch.usable("moe.pairs", kernel.why_not_pairs(x, experts, None)):
        return kernel.experts_by_pair(x, experts, None, weights, ids)
    return experts_by_row(x, experts.w13, experts.w2, weights, ids, experts.limit)
