"""Matrix products with a row-major weight [O, K]: model-dtype and fp32 output, packed weights, fixed-row test mode."""

import torch
from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.linear import reference
from sgling_kernel.linear.cpu import PackedWeight, pack_weight, packed_linear, why_not_packed
from sgling_kernel.linear.fixed_rows import fixed_row_count, fixed_rows, set_fixed_rows

__all__ = [
    "PackedWeight",
    "fixed_row_count",
    "fixed_rows",
    "linear",
    "linear_fp32",
    "pack_weight",
    "set_fixed_rows",
    "why_not_packed",
]


def linear(x: Tensor, w: Tensor | PackedWeight) -> Tensor:
    """x [N, K] times w [O, K] transposed -> [N, O] in x.dtype; see reference.linear for the rounding."""
    if isinstance(w, PackedWeight):
        return packed_linear(x, w)
    if dispatch.use_triton(x) and dispatch.is_decode_sized(x.shape[0]):
        from sgling_kernel.linear import kernel

        if dispatch.usable("linear.small_m", kernel.why_not_small_m(x, w)):
            return kernel.small_m_linear(x, w, x.dtype)
    return reference.linear(x, w)


def linear_fp32(x: Tensor, w: Tensor | PackedWeight) -> Tensor:
    """x [N, K] times w [O, K] transposed -> fp32 [N, O], never rounded between; see reference.linear_fp32."""
    if isinstance(w, PackedWeight):
        return packed_linear(x.float(), w)
    if dispatch.use_triton(x) and dispatch.is_decode_sized(x.shape[0]):
        from sgling_kernel.linear import kernel

        if dispatch.usable("linear.small_m", kernel.why_not_small_m(x, w)):
            return kernel.small_m_linear(x, w, torch.float32)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, w.t(), out_dtype=torch.float32)  # no widened copy of w
    return reference.linear_fp32(x, w)
