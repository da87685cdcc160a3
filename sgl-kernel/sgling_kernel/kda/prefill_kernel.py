"""What stands before and behind the chunk form of a prompt: its inputs in two Triton nodes, the hand-over in one."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.kda.params import KDAParams
from sgling_kernel.kda.recurrence import L2_EPS

CHUNK = 64  # rows of a chunk
RCP_LN2 = 1.4426950408889634  # the chunk form's unit of log decay: it raises 2 to it
ROWS, COLUMNS, BLOCK = 16, 32, 1024


class ChunkInputs(NamedTuple):
    """Operands of the chunk form for one request of T tokens, all contiguous.

    Attributes:
        q: [1, T, H, K] model dtype; conv, SiLU, rounding, l2 norm, rounding.
        k: as q.
        v: [1, T, H, K] model dtype; conv, SiLU, rounding.
        g: fp32 [1, T, H, K], log decay; or summed from the first row of each chunk on, in units of ln 2.
        beta: fp32 [1, T, H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@triton.jit(do_not_specialize=["T"])
def _conv_kernel(
    x, conv_pool, slots, weight, out, T, stride_x, eps,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of q, k or v; the head's norm is taken where its values are."""
    head = tl.program_id(1)
    t, k = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, BK)
    C: tl.constexpr = 3 * H * K
    c = head * K + k
    window = conv_pool + tl.load(slots) * (3 * C)
    inside = k < K
    mask = (t < T)[:, None] & inside[None, :]
    total = tl.zeros((ROWS, BK), dtype=tl.float32)
    for tap in tl.static_range(4):
        row = t + (tap - 3)
        fresh = tl.load(x + row[:, None] * stride_x + c[None, :], mask=mask & (row >= 0)[:, None], other=0.0)
        old = tl.load(window + (row[:, None] + 3) * C + c[None, :], mask=mask & (row < 0)[:, None], other=0.0)
        value = tl.where((row >= 0)[:, None], fresh, old).to(tl.float32)
        total += value * tl.load(weight + c * 4 + tap, mask=inside, other=0.0)[None, :]
    value = (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty)
    if head < 2 * H:
        wide = value.to(tl.float32)
        value = (wide * tl.rsqrt(tl.sum(wide * wide, 1) + eps)[:, None]).to(out.dtype.element_ty)
    part = (head // H).to(tl.int64) * T
    tl.store(out + ((part + t) * H + head % H)[:, None] * K + k[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["T"])
def _gates_kernel(
    f, b, a_log, dt_bias, g, beta, T, stride_f, stride_b, lower_bound, unit,
    H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """One chunk of some columns; ``SUM``: the sums over the chunk's rows so far, times ``unit``."""
    t = (tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < H * K
    mask = (t < T)[:, None] & inside[None, :]
    rate = tl.exp(tl.load(a_log + c // K, mask=inside, other=0.0))
    value = tl.load(f + t[:, None] * stride_f + c[None, :], mask=mask, other=0.0).to(tl.float32)
    value = rate[None, :] * (value + tl.load(dt_bias + c, mask=inside, other=0.0)[None, :])
    value = lower_bound / (1.0 + tl.exp(-value))
    if SUM:
        value = tl.cumsum(value, 0) * unit
    tl.store(g + t[:, None] * (H * K) + c[None, :], value, mask=mask)
    if tl.program_id(1) == 0:
        head = tl.arange(0, BH)
        each = (t < T)[:, None] & (head < H)[None, :]
        logit = tl.load(b + t[:, None] * stride_b + head[None, :], mask=each, other=0.0).to(tl.float32)
        tl.store(beta + t[:, None] * H + head[None, :], 1.0 / (1.0 + tl.exp(-logit)), mask=each)


@triton.jit(do_not_specialize=["T"])
def _hand_over_kernel(
    x, state, conv_pool, state_pool, slots, T, stride_x, C: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr
):
    """The state, and the last three rows of [window | x], into a slot; a channel is read before it is written."""
    slot = tl.load(slots)
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    value = tl.load(state + i, mask=i < STATE, other=0.0)
    tl.store(state_pool + slot * STATE + i, value, mask=i < STATE)
    window, inside = conv_pool + slot * (3 * C), i < C
    old1 = tl.load(window + C + i, mask=inside, other=0.0)
    old2 = tl.load(window + 2 * C + i, mask=inside, other=0.0)
    last = x + (T - 1).to(tl.int64) * stride_x + i
    new0 = tl.load(last - 2 * stride_x, mask=inside & (T >= 3), other=0.0)
    new1 = tl.load(last - stride_x, mask=inside & (T >= 2), other=0.0)
    new2 = tl.load(last, mask=inside, other=0.0)
    tl.debug_barrier()  # another thread may store what one has loaded
    tl.store(window + i, tl.where(T >= 3, new0, tl.where(T == 2, old2, old1)), mask=inside)
    tl.store(window + C + i, tl.where(T >= 2, new1, old2), mask=inside)
    tl.store(window + 2 * C + i, new2, mask=inside)


def chunk_inputs(
    qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, conv_pool: Tensor, slots: Tensor, summed: bool
) -> ChunkInputs:
    """Operands of the chunk form behind the conv window of slot ``slots`` [1]; rows of qkv, f and b may be strided.

    summed: whether g is, see :class:`ChunkInputs`.
    """
    tokens, (heads, dim) = qkv.shape[0], p.dt_bias.shape
    convolved = torch.empty(3, 1, tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    _conv_kernel[(triton.cdiv(tokens, ROWS), 3 * heads)](
        qkv, conv_pool, slots, p.conv_weight, convolved, tokens, qkv.stride(0), L2_EPS,
        H=heads, K=dim, BK=triton.next_power_of_2(dim), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    g = torch.empty(1, tokens, heads, dim, dtype=torch.float32, device=f.device)
    beta = torch.empty(1, tokens, heads, dtype=torch.float32, device=f.device)
    _gates_kernel[(triton.cdiv(tokens, CHUNK), triton.cdiv(heads * dim, COLUMNS))](
        f, b, p.a_log, p.dt_bias, g, beta, tokens, f.stride(0), b.stride(0), p.lower_bound, RCP_LN2,
        H=heads, K=dim, BH=triton.next_power_of_2(heads), CHUNK=CHUNK, COLUMNS=COLUMNS, SUM=summed, num_warps=4,
    )  # fmt: skip
    return ChunkInputs(*convolved.unbind(), g, beta)


def hand_over(qkv: Tensor, state: Tensor, conv_pool: Tensor, state_pool: Tensor, slots: Tensor) -> None:
    """Leave the last rows of a chunk qkv [T, C], T >= 1, and its contiguous state [H, V, K] in slot ``slots`` [1]."""
    tokens, channels = qkv.shape
    size = state.numel()
    _hand_over_kernel[(triton.cdiv(max(size, channels), BLOCK),)](
        qkv, state, conv_pool, state_pool, slots, tokens, qkv.stride(0),
        C=channels, STATE=size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
