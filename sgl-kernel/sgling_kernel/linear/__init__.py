"""Matrix products with a row-major weight [O, K]: model-dtype or fp32 output, gated norm folded in, packed weights."""

import torch
from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.linear import reference
from sgling_kernel.linear.cpu import PackedWeight, pack_weight, packed_linear, why_not_packed
from sgling_kernel.linear.fixed_rows import fixed_row_count, fixed_rows, set_fixed_rows
from sgling_kernel.norm import gated_rms_norm

__all__ = [
    "PackedWeight",
    "fixed_row_count",
    "fixed_rows",
    "gated_linear",
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
        from sgling_kernel.linear import cuda, kernel

        if dispatch.usable("linear.cuda", cuda.why_not_small_m(x, w)):
            return cuda.small_m_linear(x, w, x.dtype)
        if dispatch.usable("linear.small_m", kernel.why_not_small_m(x, w)):
            return kernel.small_m_linear(x, w, x.dtype)
    return reference.linear(x, w)


def linear_fp32(x: Tensor, w: Tensor | PackedWeight) -> Tensor:
    """x [N, K] times w [O, K] transposed -> fp32 [N, O], never rounded between; see reference.linear_fp32."""
    if isinstance(w, PackedWeight):
        return packed_linear(x.float(), w)
    if dispatch.use_triton(x) and dispatch.is_decode_sized(x.shape[0]):
        from sgling_kernel.linear import cuda, kernel

        if dispatch.usable("linear.cuda", cuda.why_not_small_m(x, w)):
            return cuda.small_m_linear(x, w, torch.float32)
        if dispatch.usable("linear.small_m", kernel.why_not_small_m(x, w)):
            return kernel.small_m_linear(x, w, torch.float32)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch.mm(x, w.t(), out_dtype=torch.float32)  # no widened copy of w
    return reference.linear_fp32(x, w)


def gated_linear(o: Tensor, z: Tensor, norm_weight: Tensor, eps: float, w: Tensor | PackedWeight) -> Tensor:
    """KDA's gated norm and output projection, o [N, H, V] -> [N, O]; see reference.gated_linear.

    Decode steps on a GPU run it as one node whose rounding is reference.gated_linear_folded's.
    """
    if dispatch.use_triton(o) and dispatch.is_decode_sized(o.shape[0]) and not isinstance(w, PackedWeight):
        from sgling_kernel.linear import cuda

        if dispatch.usable("linear.gated", cuda.why_not_gated(o, z, norm_weight, w)):
            return cuda.gated_linear(o, z, norm_weight, eps, w)
    return linear(gated_rms_norm(o, z, norm_weight, eps).flatten(1), w)
