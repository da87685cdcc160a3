"""Routed and shared experts of decode-sized batches in two Triton nodes: up with SwiGLU, down with combine.

One (row, slot) pair is a matrix-vector product: no sorting, no padding, and a row's bits depend on that row alone. An
expert chosen by several rows is read once from memory and again from L2. The last slot of a row is the shared expert.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.moe.weights import ExpertWeights
from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

UP_ROWS, UP_K, UP_WARPS = 4, 512, 1  # rows of w13 (2 gate/up pairs) and columns per step: part of the numerics
DOWN_ROWS = 16
COMBINE_COLUMNS = 1024


@triton.jit
def _clamped_swiglu(gate, up, limit):
    """min(silu(gate), limit) * clamp(up, -limit, limit); limit 0 means none. fp32; NaN passes through."""
    activated = gate / (1.0 + tl.exp(-gate))
    bound = tl.where(limit > 0, limit, float("inf"))
    activated = tl.where(activated > bound, bound, activated)
    return activated * tl.where(up > bound, bound, tl.where(up < -bound, -bound, up))


@triton.jit
def _up_kernel(
    x, w13, shared_w13, ids, hidden, stride_x, limit, shared_limit,
    D: tl.constexpr, I2: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)  # no early trigger: the next node's programs would crowd this one's out (measured: +3 us at 6 rows)
    pair = tl.program_id(1)
    row, slot = pair // SLOTS, pair % SLOTS
    if slot < TOP:
        weights = w13 + tl.load(ids + row * TOP + slot) * (I2 * D)
        bound = limit
    else:
        weights = shared_w13
        bound = shared_limit
    gu = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BK)
    acc = tl.zeros((ROWS, BK), dtype=tl.float32)
    for start in tl.static_range(0, D, BK):
        inside = start + k < D
        value = tl.load(x + row.to(tl.int64) * stride_x + start + k, mask=inside, other=0.0).to(tl.float32)
        mask = (gu < I2)[:, None] & inside[None, :]
        tile = tl.load(weights + gu[:, None] * D + start + k[None, :], mask=mask, other=0.0)
        acc += tile.to(tl.float32) * value[None, :]
    both = tl.sum(acc, 1).to(hidden.dtype.element_ty).to(tl.float32)  # gate and up are rounded, then widened
    gate, up = tl.split(tl.reshape(both, (ROWS // 2, 2)))
    out = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    value = _clamped_swiglu(gate, up, bound).to(hidden.dtype.element_ty)
    tl.store(hidden + pair.to(tl.int64) * (I2 // 2) + out, value, mask=out < I2 // 2)


@triton.jit
def _down_kernel(
    hidden, w2, shared_w2, ids, weights, out,
    D: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BI: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_trigger(PDL)
    row = tl.program_id(1)
    d = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BI)
    at = d[:, None] * WIDTH + i[None, :]
    mask = (d < D)[:, None] & (i < WIDTH)[None, :]
    values = hidden + row.to(tl.int64) * (SLOTS * WIDTH) + i
    acc = tl.zeros((ROWS,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        expert = tl.load(ids + row * TOP + slot)
        tile = tl.load(w2 + expert * (D * WIDTH) + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values + slot * WIDTH, mask=i < WIDTH, other=0.0).to(tl.float32)
        acc += tl.load(weights + row * TOP + slot) * tl.sum(tile * value[None, :], 1)
    total = acc.to(out.dtype.element_ty)
    if SLOTS > TOP:
        tile = tl.load(shared_w2 + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values + TOP * WIDTH, mask=i < WIDTH, other=0.0).to(tl.float32)
        shared = tl.sum(tile * value[None, :], 1).to(out.dtype.element_ty)
        total = (total.to(tl.float32) + shared.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * D + d, total, mask=d < D)


@triton.jit
def _swiglu_kernel(gu, out, stride, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = 2 * (tl.program_id(1) * BLOCK) + tl.arange(0, 2 * BLOCK)
    both = tl.load(gu + row * stride + pair, mask=pair < 2 * WIDTH, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    tl.store(out + row * WIDTH + i, _clamped_swiglu(gate, up, limit).to(out.dtype.element_ty), mask=i < WIDTH)


@triton.jit
def _combine_kernel(
    down, place, weights, beside, out, D: tl.constexpr, TOP: tl.constexpr, BESIDE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP):
        at = tl.load(place + row * TOP + slot) * D
        value = tl.load(down + at + d, mask=d < D, other=0.0).to(tl.float32)
        acc += tl.load(weights + row * TOP + slot) * value
    total = acc.to(out.dtype.element_ty)
    if BESIDE:
        shared = tl.load(beside + row * D + d, mask=d < D, other=0.0)
        total = (total.to(tl.float32) + shared.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * D + d, total, mask=d < D)


def why_not_pairs(x: Tensor, experts: ExpertWeights, shared: ExpertWeights | None) -> str | None:
    """Reason why the two-node form cannot run, or None."""
    if not (experts.w13.is_contiguous() and experts.w2.is_contiguous()) or x.stride(1) != 1:
        return "operands must be row major"
    if shared is not None and shared.w2.shape != experts.w2.shape[1:]:
        return f"shared expert of shape {tuple(shared.w2.shape)} beside routed ones of {tuple(experts.w2.shape[1:])}"
    return None


def experts_by_pair(
    x: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, weights: Tensor, ids: Tensor
) -> Tensor:
    """Routed sum (one rounding), plus the shared expert (one rounding, then the sum's) when there is one."""
    rows, dim = x.shape
    weights, ids = weights.contiguous(), ids.contiguous()
    top, width2 = ids.shape[1], experts.w13.shape[1]
    slots = top + (shared is not None)
    extra = shared or experts
    hidden = torch.empty(rows * slots, width2 // 2, dtype=x.dtype, device=x.device)
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    _up_kernel[(triton.cdiv(width2, UP_ROWS), rows * slots)](
        x, experts.w13, extra.w13, ids, hidden, x.stride(0), float(experts.limit or 0), float(extra.limit or 0),
        D=dim, I2=width2, TOP=top, SLOTS=slots, ROWS=UP_ROWS, BK=min(UP_K, triton.next_power_of_2(dim)),
        num_warps=UP_WARPS, **launch_pdl(x),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(dim, DOWN_ROWS), rows)](
        hidden, experts.w2, extra.w2, ids, weights, out,
        D=dim, WIDTH=width2 // 2, TOP=top, SLOTS=slots, ROWS=DOWN_ROWS, BI=triton.next_power_of_2(width2 // 2),
        num_warps=4, **launch_pdl(x),
    )  # fmt: skip
    return out


def swiglu(gu: Tensor, limit: float | None) -> Tensor:
    """reference.swiglu for gu [N, 2I] with unit column stride."""
    rows, width = gu.shape[0], gu.shape[1] // 2
    out = torch.empty(rows, width, dtype=gu.dtype, device=gu.device)
    block = min(1024, triton.next_power_of_2(width))
    _swiglu_kernel[(rows, triton.cdiv(width, block))](
        gu, out, gu.stride(0), float(limit or 0), WIDTH=width, BLOCK=block, num_warps=4, **launch_pdl(gu)
    )
    return out


def combine(down: Tensor, place: Tensor, weights: Tensor, beside: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum over slots of weights[n, j] * down[place[n, j]] in slot order, fp32, one rounding -> [N, d].

    beside, contiguous [N, d], is added to the rounded sum, which rounds again.
    """
    rows, top = place.shape
    out = torch.empty(rows, down.shape[1], dtype=dtype, device=down.device)
    block = min(COMBINE_COLUMNS, triton.next_power_of_2(down.shape[1]))
    _combine_kernel[(rows, triton.cdiv(down.shape[1], block))](
        down, place, weights, down if beside is None else beside, out,
        D=down.shape[1], TOP=top, BESIDE=beside is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
