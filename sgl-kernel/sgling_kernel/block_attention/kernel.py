"""Paged attention of draft blocks in Triton: split-KV, then one node that combines the splits (see reference.py).

Splits of ``SPLIT`` positions from position 0 are dealt round robin to ``PROGRAMS`` programs per key head and row tile,
which stop at the device length: neither the work nor the bits depend on the page table's width. Tiles, the order of
splits and the combine are constants of the layer's shape, so a row's bits depend on that row and its own request alone.
Positions nobody sees are never loaded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.mla.context import PagedContext
from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

SPLIT, PROGRAMS = 64, 32  # part of the numerics
LOG2E = 1.4426950408889634
COMBINE_COLUMNS = 64


@triton.jit
def _attended(row, seq_lens, request, W, window):
    """(committed length, first position any row sees, end) of a request; a padded one sees the dummy slot."""
    seq = tl.where(row > 0, tl.load(seq_lens + request), 0)
    return seq, tl.maximum(seq - window + 1, 0), seq + W


@triton.jit(do_not_specialize=["W", "window"])
def _block_split_kernel(
    q, strides, pools, paging, parts, table_width, scale_log2, W, window,
    SHAPE: tl.constexpr, BLOCKS: tl.constexpr, CAUSAL: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program's splits of one key head; with a TAIL the values are the MAIN part of their keys."""
    KVH: tl.constexpr = SHAPE[0]
    G: tl.constexpr = SHAPE[1]
    MAIN: tl.constexpr = SHAPE[2]
    TAIL: tl.constexpr = SHAPE[3]
    V: tl.constexpr = SHAPE[4]
    BM: tl.constexpr = BLOCKS[0]
    BN: tl.constexpr = BLOCKS[1]
    BV: tl.constexpr = BLOCKS[4]
    pdl_wait(PDL)
    pdl_trigger(PDL)
    keys, values = pools
    req_to_token, rows, seq_lens = paging
    part_out, part_ml = parts
    program, tile, request = tl.program_id(0), tl.program_id(1) // KVH, tl.program_id(2)
    head = tl.program_id(1) % KVH
    stride_qn, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh = strides
    row = tl.load(rows + request)
    seq, begin, end = _attended(row, seq_lens, request, W, window)
    m = tile * BM + tl.arange(0, BM)
    valid = m < W * G
    own = seq + m // G
    last = own if CAUSAL else own * 0 + (end - 1)
    d, t, v, col = tl.arange(0, BLOCKS[2]), tl.arange(0, BLOCKS[3]), tl.arange(0, BV), tl.arange(0, BN)
    at = q + (request.to(tl.int64) * W + m // G) * stride_qn + (head * G + m % G) * stride_qh
    query = tl.load(at[:, None] + d[None, :], mask=valid[:, None] & (d < MAIN)[None, :], other=0.0)
    if TAIL > 0:
        tail = tl.load(at[:, None] + MAIN + t[None, :], mask=valid[:, None] & (t < TAIL)[None, :], other=0.0)
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BV), dtype=tl.float32)
    first = begin // BN
    for split in range(first + (program + P - first % P) % P, (end + BN - 1) // BN, P):
        position = split * BN + col
        seen = (position >= begin) & (position < end)
        slot = tl.load(req_to_token + row * table_width + position, mask=seen, other=0).to(tl.int64)
        key_at = keys + slot[:, None] * stride_ks + head * stride_kh
        key = tl.load(key_at + d[None, :], mask=seen[:, None] & (d < MAIN)[None, :], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if TAIL > 0:
            key_tail = tl.load(key_at + MAIN + t[None, :], mask=seen[:, None] & (t < TAIL)[None, :], other=0.0)
            score = tl.dot(tail, tl.trans(key_tail), score, input_precision="ieee")
        visible = (position[None, :] <= last[:, None]) & (position[None, :] > own[:, None] - window)
        score = tl.where(visible & seen[None, :], score * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        factor = tl.exp2(peak - anchor)
        prob = tl.exp2(score - anchor[:, None])
        mass = mass * factor + tl.sum(prob, 1)
        if TAIL > 0:
            value = key
        else:
            value_at = values + slot[:, None] * stride_vs + head * stride_vh + v[None, :]
            value = tl.load(value_at, mask=seen[:, None] & (v < V)[None, :], other=0.0)
        acc = tl.dot(prob.to(value.dtype), value, acc * factor[:, None], input_precision="ieee")
        peak = new_peak
    part = ((request.to(tl.int64) * P + program) * KVH + head) * (W * G) + m
    tl.store(part_ml + part * 2, peak, mask=valid)
    tl.store(part_ml + part * 2 + 1, mass, mask=valid)
    if first + (program + P - first % P) % P < (end + BN - 1) // BN:
        tl.store(part_out + part[:, None] * V + v[None, :], acc, mask=valid[:, None] & (v < V)[None, :])


@triton.jit(do_not_specialize=["W"])
def _block_combine_kernel(
    part_out, part_ml, out, W, KVH: tl.constexpr, G: tl.constexpr, V: tl.constexpr, P: tl.constexpr, BC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_trigger(PDL)
    m, head, request = tl.program_id(0), tl.program_id(1) % KVH, tl.program_id(2).to(tl.int64)
    program, c = tl.arange(0, P), (tl.program_id(1) // KVH) * BC + tl.arange(0, BC)
    part = ((request * P + program) * KVH + head) * (W * G) + m
    peak, mass = tl.load(part_ml + part * 2), tl.load(part_ml + part * 2 + 1)
    weight = tl.exp2(peak - tl.max(peak, 0))
    mask = (mass > 0)[:, None] & (c < V)[None, :]
    value = tl.load(part_out + part[:, None] * V + c[None, :], mask=mask, other=0.0)
    total = tl.sum(value * weight[:, None], 0) / tl.sum(mass * weight, 0)
    at = ((request * W + m // G) * (KVH * G) + head * G + m % G) * V + c
    tl.store(out + at, total.to(out.dtype.element_ty), mask=c < V)


def block_attention(
    q: Tensor, keys: Tensor, values: Tensor, ctx: PagedContext, causal: bool, window: int | None, scale: float
) -> Tensor:
    """reference.block_attention; probabilities are rounded to the model dtype before they meet the values.

    Values that are the leading part of their keys (the latent form) are loaded once.
    """
    (rows, heads, dim), (kv_heads, v_dim) = q.shape, values.shape[1:]
    bs, width, group = ctx.seq_lens.shape[0], ctx.width, q.shape[1] // kv_heads
    shared = values.data_ptr() == keys.data_ptr()
    main = v_dim if shared else dim
    tile = 16 if shared else min(64, max(16, 16 * triton.next_power_of_2(group)))
    part_out = torch.empty(bs, PROGRAMS, kv_heads, width * group, v_dim, dtype=torch.float32, device=q.device)
    part_ml = torch.empty(bs, PROGRAMS, kv_heads, width * group, 2, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, heads, v_dim, dtype=q.dtype, device=q.device)
    pdl = launch_pdl(q)
    shape = (kv_heads, group, main, dim - main, v_dim)
    _block_split_kernel[(PROGRAMS, kv_heads * triton.cdiv(width * group, tile), bs)](
        q, (*q.stride()[:2], *keys.stride()[:2], *values.stride()[:2]), (keys, values),
        (ctx.req_to_token, ctx.req_pool_indices, ctx.seq_lens), (part_out, part_ml), ctx.req_to_token.stride(0),
        scale * LOG2E, width, 2**30 if window is None else window,
        SHAPE=shape, BLOCKS=(tile, SPLIT, *map(_block, shape[2:])), CAUSAL=causal, P=PROGRAMS,
        num_warps=8 if shared else 4, num_stages=3 if main <= 128 else 2, **pdl,
    )  # fmt: skip
    columns = min(COMBINE_COLUMNS, triton.next_power_of_2(v_dim))
    _block_combine_kernel[(width * group, kv_heads * triton.cdiv(v_dim, columns), bs)](
        part_out, part_ml, out, width, KVH=kv_heads, G=group, V=v_dim, P=PROGRAMS, BC=columns, num_warps=4, **pdl
    )
    return out


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def why_not_paged(q: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """Reason why the kernel cannot take these operands, or None."""
    if q.stride(-1) != 1 or keys.stride(-1) != 1 or values.stride(-1) != 1:
        return "the last dimension of queries, keys and values must be contiguous"
    inside = keys.shape[1] == 1 and values.stride() == keys.stride() and values.shape[2] < keys.shape[2]
    if values.data_ptr() == keys.data_ptr() and not inside:
        return "values inside keys need a single key head, the same strides, and a rest of the key behind them"
    return None
