"""RMS norms in CUDA C++ (norm.cu): bf16 rows, one node each, 16-byte loads, the weight requested before the wait."""

import torch
from torch import Tensor

from sgling_kernel import cuda
from sgling_kernel.cuda import operands

_SOURCE = "norm/norm.cu"
_LOAD, _MAX_DIM = 8, 8192  # columns of one load; a row is held by one CTA


def why_not_rows(*rows: Tensor) -> str | None:
    """Reason why rows [N, D] (and a weight [D], for the dtype) cannot be read 16 bytes at a time, or None."""
    if (reason := cuda.why_not()) is not None:
        return reason
    for x in rows:
        if x.shape[-1] % _LOAD or x.shape[-1] > _MAX_DIM:
            return f"rows of {x.shape[-1]} values: the CUDA norms take multiples of {_LOAD} up to {_MAX_DIM}"
        if (reason := operands.why_not_rows("an operand", x)) is not None:
            return reason
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """reference.rms_norm for x [..., D]; rows of a 2-D x may be strided, more dimensions must be contiguous."""
    dim = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, dim)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        function = cuda.function(_SOURCE, "rms_norm")
        cuda.launch(function, out, rows, weight, rows.stride(0), rows.shape[0], dim, eps)
    return out.view(x.shape)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """reference.fused_add_rms_norm for x, residual [N, D]."""
    count, dim = x.shape
    out = torch.empty((2, count, dim), dtype=x.dtype, device=x.device)
    if count:
        function = cuda.function(_SOURCE, "add_rms_norm")
        strides = x.stride(0), residual.stride(0)
        cuda.launch(function, out[0], out[1], x, residual, weight, *strides, count, dim, eps)
    return out[0], out[1]
