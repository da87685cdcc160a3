"""Embedding lookups fused with norms in Triton (see reference.py): one program per normalised vector.

The block is a function of the vector's length alone, so a row's bits do not depend on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait


@triton.jit
def _embed_norm_kernel(
    ids, table, weight, rows, normed, stride_ids, eps, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < D
    w = tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    stored = tl.load(table + tl.load(ids + n * stride_ids) * D + col, mask=mask, other=0.0)
    value = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(rows + n * D + col, stored, mask=mask)
    tl.store(normed + n * D + col, (value * scale * w).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _embed_pair_kernel(
    ids, table, weight, hidden, hidden_weight, rows, out, stride_ids, stride_hidden, eps, hidden_eps,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, 0) normalises the embedding of row n, program (n, 1) its hidden state."""
    n, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, BLOCK)
    mask = col < D
    weights = tl.where(half == 0, weight, hidden_weight)
    w = tl.load(weights + col, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    if half == 0:
        source = table + tl.load(ids + n * stride_ids) * D
    elif rows is None:
        source = hidden + n * stride_hidden
    else:
        source = hidden + tl.load(rows + n) * stride_hidden
    value = tl.load(source + col, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / D + tl.where(half == 0, eps, hidden_eps))
    tl.store(out + n * (2 * D) + half * D + col, (value * scale * w).to(out.dtype.element_ty), mask=mask)


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def embed_norm(ids: Tensor, table: Tensor, norm: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
    """reference.embed_norm in one node."""
    (weight, eps), count, dim = norm, ids.shape[0], table.shape[1]
    out = torch.empty(2, count, dim, dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(dim)
    _embed_norm_kernel[(count,)](
        ids, table, weight, out[0], out[1], ids.stride(0), eps,
        D=dim, BLOCK=block, num_warps=_warps(block), **launch_pdl(table),
    )  # fmt: skip
    return out[0], out[1]


def embed_pair(
    ids: Tensor,
    table: Tensor,
    norm: tuple[Tensor, float],
    hidden: Tensor,
    hidden_norm: tuple[Tensor, float],
    rows: Tensor | None = None,
) -> Tensor:
    """reference.embed_pair in one node; rows of ``hidden`` may be strided."""
    count, dim = ids.shape[0], table.shape[1]
    out = torch.empty(count, 2 * dim, dtype=table.dtype, device=table.device)
    block = triton.next_power_of_2(dim)
    _embed_pair_kernel[(count, 2)](
        ids, table, norm[0], hidden, hidden_norm[0], rows, out, ids.stride(0), hidden.stride(0), norm[1],
        hidden_norm[1], D=dim, BLOCK=block, num_warps=_warps(block), **launch_pdl(table),
    )  # fmt: skip
    return out
