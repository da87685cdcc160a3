"""RMS norms in Triton: one program per normalised vector, statistics in fp32, one rounding (see reference.py).

The block is a function of the vector's length alone, so a row's bits do not depend on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait


@triton.jit
def _rms_kernel(x, weight, out, stride_x, stride_out, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < D
    w = tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    value = tl.load(x + row * stride_x + col, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(out + row * stride_out + col, (value * scale * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_kernel(
    x, residual, weight, out, new_residual, stride_x, stride_r, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < D
    w = tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    total = tl.load(x + row * stride_x + col, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + row * stride_r + col, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    tl.store(out + row * D + col, (total * scale * w).to(out.dtype.element_ty), mask=mask)
    tl.store(new_residual + row * D + col, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_rms_kernel(
    o, z, weight, out, stride_z, eps, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, BLOCK)
    mask = col < V
    at = row * (H * V) + head * V + col
    w = tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    value = tl.load(o + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / V + eps)
    gate = tl.load(z + row * stride_z + head * V + col, mask=mask, other=0.0).to(tl.float32)
    value = value * scale * w * (1.0 / (1.0 + tl.exp(-gate)))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """reference.rms_norm; rows of a 2-D x may be strided, more dimensions must be contiguous."""
    dim = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, dim)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    _rms_kernel[(rows.shape[0],)](
        rows, weight, out, rows.stride(0), dim, eps, D=dim, BLOCK=block, num_warps=_warps(block), **launch_pdl(x)
    )
    return out.view(x.shape)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """reference.fused_add_rms_norm for x, residual [N, D] with unit column stride."""
    count, dim = x.shape
    out = torch.empty((2, count, dim), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(dim)
    _add_rms_kernel[(count,)](
        x, residual, weight, out[0], out[1], x.stride(0), residual.stride(0), eps,
        D=dim, BLOCK=block, num_warps=_warps(block), **launch_pdl(x),
    )  # fmt: skip
    return out[0], out[1]


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """reference.gated_rms_norm; o contiguous, the rows of z may be strided."""
    count, heads, dim = o.shape
    z = z.view(count, heads * dim) if z.dim() == 3 else z
    out = torch.empty_like(o)
    block = triton.next_power_of_2(dim)
    _gated_rms_kernel[(count, heads)](
        o, z, weight, out, z.stride(0), eps, H=heads, V=dim, BLOCK=block, num_warps=1, **launch_pdl(o)
    )
    return out
