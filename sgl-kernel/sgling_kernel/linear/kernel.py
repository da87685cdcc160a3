"""Small-M matrix product in Triton: streams the weight once, fp32 accumulation in one fixed order of K.

A row's bits depend on that row alone for any M: K is walked in the same blocks whatever the tile of M and N is, and
the matrix instructions accumulate in k order (measured on the H200: tiles and instruction shapes change no bit).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SLICES, BLOCK_K = 8, 64  # K slices (one warp each) and columns per step: part of the numerics of every decode product


@triton.jit(do_not_specialize=["M"])
def _small_m_kernel(
    x,
    w,
    out,
    M,
    stride_x,
    OUT: tl.constexpr,
    K: tl.constexpr,
    KS: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """K is cut into S slices of KS columns, one warp each; the slices are summed in one fixed tree at the end."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    k = tl.arange(0, S)[:, None] * KS + tl.arange(0, BK)[None, :]
    x_at = x + m[None, :, None] * stride_x + k[:, None, :]
    w_at = w + n.to(tl.int64)[None, None, :] * K + k[:, :, None]
    acc = tl.zeros((S, BM, BN), dtype=tl.float32)
    for start in range(0, KS, BK):
        inside = k + start < K
        rows = tl.load(x_at + start, mask=(m < M)[None, :, None] & inside[:, None, :], other=0.0)
        weights = tl.load(w_at + start, mask=(n < OUT)[None, None, :] & inside[:, :, None], other=0.0)
        acc = tl.dot(rows, weights, acc, input_precision="ieee")
    total = tl.sum(acc, 0)
    mask = (m < M)[:, None] & (n < OUT)[None, :]
    tl.store(out + m[:, None] * OUT + n[None, :], total.to(out.dtype.element_ty), mask=mask)


def small_m_linear(x: Tensor, w: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x [M, K] (rows may be strided) times w [O, K] transposed -> [M, O] in ``out_dtype``."""
    count, width = x.shape
    outputs = w.shape[0]
    out = torch.empty(count, outputs, dtype=out_dtype, device=x.device)
    bm = 16 if count <= 16 else 32
    bn = 32 if outputs >= 4096 else 16
    grid = (triton.cdiv(outputs, bn), triton.cdiv(count, bm))
    _small_m_kernel[grid](
        x, w, out, count, x.stride(0), OUT=outputs, K=width, KS=triton.cdiv(width, SLICES * BLOCK_K) * BLOCK_K,
        S=SLICES, BM=bm, BN=bn, BK=BLOCK_K, num_warps=SLICES, num_stages=3,
    )  # fmt: skip
    return out


def why_not_small_m(x: Tensor, w: Tensor) -> str | None:
    """Reason why the kernel cannot take these operands, or None."""
    if x.dim() != 2 or x.stride(1) != 1 or not w.is_contiguous():
        return "operands must be row major and two-dimensional"
    return None
