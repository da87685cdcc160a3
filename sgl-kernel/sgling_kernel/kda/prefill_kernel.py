"""What every prompt row feeds the chunk form: convolved q, k, v and the log decay, each in one elementwise node."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.kda.params import KDAParams

ROWS, COLUMNS = 16, 128


@triton.jit
def _conv_kernel(x, window, weight, out, T, stride_x, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (t < T)[:, None] & (c < C)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tap in tl.static_range(4):
        row = (t + (tap - 3)).to(tl.int64)
        fresh = tl.load(x + row[:, None] * stride_x + c[None, :], mask=mask & (row >= 0)[:, None], other=0.0)
        old = tl.load(window + (row[:, None] + 3) * C + c[None, :], mask=mask & (row < 0)[:, None], other=0.0)
        value = tl.where((row >= 0)[:, None], fresh, old).to(tl.float32)
        total += value * tl.load(weight + c * 4 + tap, mask=c < C, other=0.0)[None, :]
    value = (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty)
    tl.store(out + t.to(tl.int64)[:, None] * C + c[None, :], value, mask=mask)


@triton.jit
def _decay_kernel(
    f, a_log, dt_bias, out, stride_f, lower_bound, HK: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < HK
    rate = tl.exp(tl.load(a_log + c // K, mask=mask, other=0.0))
    value = tl.load(f + t * stride_f + c, mask=mask, other=0.0).to(tl.float32)
    value = rate * (value + tl.load(dt_bias + c, mask=mask, other=0.0))
    tl.store(out + t * HK + c, lower_bound / (1.0 + tl.exp(-value)), mask=mask)


def convolve(qkv: Tensor, window: Tensor, weight: Tensor) -> Tensor:
    """Causal conv of width 4 with SiLU over qkv [T, C] behind window [3, C] -> [T, C], rounded once."""
    tokens, channels = qkv.shape
    out = torch.empty(tokens, channels, dtype=qkv.dtype, device=qkv.device)
    grid = (triton.cdiv(tokens, ROWS), triton.cdiv(channels, COLUMNS))
    _conv_kernel[grid](
        qkv, window, weight, out, tokens, qkv.stride(0), C=channels, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
    )
    return out


def log_decay(f: Tensor, p: KDAParams) -> Tensor:
    """g of ``recurrence.gates``: f [T, H·K] -> fp32 [T, H, K]."""
    heads, dim = p.dt_bias.shape
    out = torch.empty(f.shape[0], heads, dim, dtype=torch.float32, device=f.device)
    block = min(1024, triton.next_power_of_2(heads * dim))
    grid = (f.shape[0], triton.cdiv(heads * dim, block))
    _decay_kernel[grid](
        f, p.a_log, p.dt_bias, out, f.stride(0), p.lower_bound, HK=heads * dim, K=dim, BLOCK=block, num_warps=4
    )
    return out
