"""Routed experts of a prefill chunk on a GPU: pairs sorted by expert, grouped library products, ordered combine."""

import torch
from torch import Tensor

from sgling_kernel.moe import kernel
from sgling_kernel.moe.weights import ExpertWeights

_MIN_CAPABILITY = (9, 0)


def why_not_grouped(x: Tensor) -> str | None:
    """Reason why the library's grouped product cannot serve these operands, or None."""
    if x.dtype != torch.bfloat16:
        return f"the grouped product takes bf16, not {x.dtype}"
    if torch.cuda.get_device_capability(x.device) < _MIN_CAPABILITY:
        return "the grouped product needs compute capability 9.0"
    return None


def experts_grouped(x: Tensor, experts: ExpertWeights, weights: Tensor, ids: Tensor) -> Tensor:
    """reference.moe_experts, except that the down product is rounded to bf16 before it is weighed."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    numbers = torch.arange(experts.w13.shape[0], device=x.device)
    ends = torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)
    rows = x.index_select(0, order // ids.shape[1])
    gu = torch._grouped_mm(rows, experts.w13.transpose(1, 2), offs=ends)
    down = torch._grouped_mm(kernel.swiglu(gu, experts.limit), experts.w2.transpose(1, 2), offs=ends)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=x.device)
    return kernel.combine(down, place.view_as(ids), weights, x.dtype)
