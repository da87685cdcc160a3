"""Feed-forward operators: routed experts, dense and shared FFN, clamped SwiGLU."""

from torch import Tensor

from sgling_kernel.linear import fixed_row_count
from sgling_kernel.moe.cpu import experts_by_row, experts_grouped, why_not_grouped
from sgling_kernel.moe.reference import dense_ffn, interleave_w13, swiglu

__all__ = ["dense_ffn", "interleave_w13", "moe_experts", "swiglu", "why_not_grouped"]

_FEW_PAIRS = 4  # up to here copying expert weights beats the grouped product's fixed cost


def moe_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float | None) -> Tensor:
    """Sum over a row's experts of weight * expert(x); see reference.moe_experts for shapes and rounding.

    Few pairs, fixed-row mode and operands that `why_not_grouped` refuses go row by row, the rest grouped by expert.
    """
    few = ids.numel() <= _FEW_PAIRS
    by_row = few or fixed_row_count() is not None or why_not_grouped(x, w13, w2) is not None
    experts = experts_by_row if by_row else experts_grouped
    return experts(x, w13, w2, weights, ids, limit)
