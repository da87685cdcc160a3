"""Small-M matrix products in Triton: the weight is streamed once, fp32 accumulation in one fixed order of K.

A row's bits depend on that row alone for any M: how K is walked is a property of the weight's shape, and the matrix
instructions accumulate in k order whatever the tile of M and N is (measured on the H200: tiles change no bit).
Long, narrow products are cut into K slices, one warp each, because a chain of dependent matrix instructions over all of
K costs more time than the weight's bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 128  # columns per step: part of the numerics of every decode product
SLICES, SLICED_MIN_K, SLICED_MAX_OUT = 4, 2048, 16384  # likewise


@triton.jit(do_not_specialize=["M"])
def _whole_kernel(
    x, w, out, M, stride_x, OUT: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x + m[:, None] * stride_x + k[None, :]
    w_at = w + n.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inside = k < K - start
        rows = tl.load(x_at + start, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        weights = tl.load(w_at + start, mask=(n < OUT)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(rows, weights, acc, input_precision="ieee")
    mask = (m < M)[:, None] & (n < OUT)[None, :]
    tl.store(out + m[:, None] * OUT + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _sliced_kernel(
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
    (count, width), outputs = x.shape, w.shape[0]
    out = torch.empty(count, outputs, dtype=out_dtype, device=x.device)
    bm = 16 if count <= 16 else 32
    if width >= SLICED_MIN_K and outputs < SLICED_MAX_OUT:
        grid = (triton.cdiv(outputs, 16), triton.cdiv(count, bm))
        _sliced_kernel[grid](
            x, w, out, count, x.stride(0), OUT=outputs, K=width, KS=triton.cdiv(width, SLICES * BLOCK_K) * BLOCK_K,
            S=SLICES, BM=bm, BN=16, BK=BLOCK_K, num_warps=SLICES, num_stages=3 if outputs >= 4096 else 4,
        )  # fmt: skip
        return out
    bn = 64 if outputs >= SLICED_MAX_OUT else 32
    grid = (triton.cdiv(outputs, bn), triton.cdiv(count, bm))
    _whole_kernel[grid](
        x, w, out, count, x.stride(0), OUT=outputs, K=width, BM=bm, BN=bn, BK=BLOCK_K, num_warps=4, num_stages=5
    )
    return out


def why_not_small_m(x: Tensor, w: Tensor) -> str | None:
    """Reason why the kernel cannot take these operands, or None."""
    if x.dim() != 2 or x.stride(1) != 1 or not w.is_contiguous():
        return "operands must be row major and two-dimensional"
    if x.shape[1] != w.shape[1]:
        return f"x {tuple(x.shape)} and the weight {tuple(w.shape)} are no operands of a product"
    return None
