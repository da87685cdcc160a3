"""Routed experts of a prefill chunk on a GPU: pairs sorted by expert, grouped library products, ordered combine."""

import torch
from torch import Tensor

from sgling_kernel.moe import by_expert, kernel
from sgling_kernel.moe.weights import ExpertWeights

_MIN_CAPABILITY = (9, 0)


def why_not_grouped(x: Tensor) -> str | None:
    """Reason why the library's grouped product cannot serve these operands, or None."""
    if x.dtype != torch.bfloat16:
        return f"the grouped product takes bf16, not {x.dtype}"
    if torch.cuda.get_device_capability(x.device) < _MIN_CAPABILITY:
        return "the grouped product needs compute capability 9.0"
    return None


def experts_grouped(
    x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor, beside: Tensor | None = None
) -> Tensor:
    """reference.moe_experts, except that the down product is rounded to bf16 before it is weighed.

    beside [N, d] in x.dtype, the shared expert's output, is added to the rounded sum.
    """
    place, ends = by_expert.places(ids.contiguous(), experts.w13.shape[0])
    gu = torch._grouped_mm(by_expert.spread_rows(x, place), experts.w13.transpose(1, 2), offs=ends)
    down = torch._grouped_mm(kernel.swiglu(gu, experts.limit), experts.w2.transpose(1, 2), offs=ends)
    return kernel.combine(down, place, weights, beside, x.dtype)
