"""Latent attention in Triton: query and cache preparation, split-KV decode, per-head products, head gate.

Decode walks fixed splits of ``SPLIT`` positions from position 0, dealt round robin to ``PROGRAMS`` programs per row
tile, and stops at the device length: neither the work nor the bits depend on the page table's width. Each row's bits
depend on that row alone: tiles, the order of splits and the combine are constants. Positions no row sees are never
loaded, and ``prepare`` stores finite values only, so that what a row of the window must not see is 0 times a number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.mla.context import LOG2E, PROGRAMS, SPLIT, PagedContext
from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

ROW_TILE, KV_TILE = 16, 64  # part of the numerics, as SPLIT is
COMBINE_COLUMNS = 64


@triton.jit(do_not_specialize=["W"])
def _split_kernel(
    queries, strides, kv_pool, req_to_token, rows, seq_lens, parts, table_width, scale_log2, W,
    H: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    BL: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_trigger(PDL)
    program, tile, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_lat, q_pe = queries
    part_out, part_ml = parts
    stride_ln, stride_lh, stride_pn, stride_ph = strides  # row and head strides of both
    row = tl.load(rows + request)
    seq = tl.where(row > 0, tl.load(seq_lens + request), 0)
    total = seq + W
    m = tile * BM + tl.arange(0, BM)
    valid = m < W * H
    n = request.to(tl.int64) * W + m // H
    lat, rope, col = tl.arange(0, BL), tl.arange(0, BR), tl.arange(0, BN)
    ql_at = q_lat + n[:, None] * stride_ln + (m % H)[:, None] * stride_lh + lat[None, :]
    qp_at = q_pe + n[:, None] * stride_pn + (m % H)[:, None] * stride_ph + rope[None, :]
    ql = tl.load(ql_at, mask=valid[:, None] & (lat < LATENT)[None, :], other=0.0)
    qp = tl.load(qp_at, mask=valid[:, None] & (rope < ROPE)[None, :], other=0.0)
    last = seq + m // H
    peak = tl.full((BM,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, BL), dtype=tl.float32)
    for split in range(program, (total + SPLIT - 1) // SPLIT, P):
        for offset in range(0, SPLIT, BN):
            position = split * SPLIT + offset + col
            seen = position < total
            slot = tl.load(req_to_token + row * table_width + position, mask=seen, other=0)
            at = kv_pool + slot[:, None] * (LATENT + ROPE)
            kv = tl.load(at + lat[None, :], mask=seen[:, None] & (lat < LATENT)[None, :], other=0.0)
            pe = tl.load(at + LATENT + rope[None, :], mask=seen[:, None] & (rope < ROPE)[None, :], other=0.0)
            score = tl.dot(ql, tl.trans(kv), input_precision="ieee")
            score = tl.dot(qp, tl.trans(pe), score, input_precision="ieee") * scale_log2
            score = tl.where(position[None, :] <= last[:, None], score, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            anchor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            factor = tl.exp2(peak - anchor)
            prob = tl.exp2(score - anchor[:, None])
            mass = mass * factor + tl.sum(prob, 1)
            acc = tl.dot(prob.to(kv.dtype), kv, acc * factor[:, None], input_precision="ieee")
            peak = new_peak
    if program * SPLIT < total:
        part = (request.to(tl.int64) * P + program) * (W * H) + m
        tl.store(part_out + part[:, None] * LATENT + lat[None, :], acc, mask=valid[:, None] & (lat < LATENT)[None, :])
        tl.store(part_ml + part * 2, peak, mask=valid)
        tl.store(part_ml + part * 2 + 1, mass, mask=valid)


@triton.jit(do_not_specialize=["W"])
def _combine_kernel(
    part_out, part_ml, rows, seq_lens, out, W,
    H: tl.constexpr, LATENT: tl.constexpr, SPLIT: tl.constexpr, P: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_trigger(PDL)
    m, request = tl.program_id(0), tl.program_id(2)
    seq = tl.where(tl.load(rows + request) > 0, tl.load(seq_lens + request), 0)
    program, c = tl.arange(0, P), tl.program_id(1) * BC + tl.arange(0, BC)
    used = program * SPLIT < seq + W
    part = (request.to(tl.int64) * P + program) * (W * H) + m
    peak = tl.load(part_ml + part * 2, mask=used, other=float("-inf"))
    mass = tl.load(part_ml + part * 2 + 1, mask=used, other=0.0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    mask = used[:, None] & (c < LATENT)[None, :]
    value = tl.load(part_out + part[:, None] * LATENT + c[None, :], mask=mask, other=0.0)
    total = tl.sum(value * weight[:, None], 0) / tl.sum(mass * weight, 0)
    at = (request.to(tl.int64) * (W * H) + m) * LATENT + c
    tl.store(out + at, total.to(out.dtype.element_ty), mask=c < LATENT)


@triton.jit(do_not_specialize=["N"])
def _per_head_kernel(
    x, w, out, N, stride_n, stride_h,
    H: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_trigger(PDL)
    head = tl.program_id(1)
    n = tl.program_id(2) * BM + tl.arange(0, BM)
    o, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, IN, BK):
        inside = k < IN - start
        at = x + n.to(tl.int64)[:, None] * stride_n + head * stride_h + start + k[None, :]
        rows = tl.load(at, mask=(n < N)[:, None] & inside[None, :], other=0.0)
        weights = w + (head * IN + start + k)[:, None] * OUT + o[None, :]
        acc = tl.dot(
            rows, tl.load(weights, mask=inside[:, None] & (o < OUT)[None, :], other=0.0), acc, input_precision="ieee"
        )
    at = out + (n.to(tl.int64)[:, None] * H + head) * OUT + o[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (o < OUT)[None, :])


@triton.jit
def _head_gate_kernel(
    o, gate, out, stride_gate, H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    logit = tl.load(gate + n * stride_gate + head).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-logit))).to(out.dtype.element_ty).to(tl.float32)
    at = (n * H + head) * V + c
    value = tl.load(o + at, mask=c < V, other=0.0).to(tl.float32) * factor
    tl.store(out + at, value.to(out.dtype.element_ty), mask=c < V)


@triton.jit
def _prepare_kernel(
    pe, latent, weight, positions, table, kv_pool, loc, q_pe, stride_pe, stride_latent, eps,
    H: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program h < H rotates one query head; program H rotates the key, normalises the latent and stores both."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half, inside = tl.arange(0, BR // 2), tl.arange(0, BR // 2) < ROPE // 2
    at = pe + n * stride_pe + head * ROPE + 2 * half
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    angle = table + tl.load(positions + n) * ROPE + 2 * half
    cos, sin = tl.load(angle, mask=inside, other=0.0), tl.load(angle + 1, mask=inside, other=0.0)
    turned, other = first * cos - second * sin, second * cos + first * sin
    if head < H:
        target = q_pe + (n * H + head) * ROPE + 2 * half
    else:
        row = kv_pool + tl.load(loc + n) * (LATENT + ROPE)
        c = tl.arange(0, BL)
        value = tl.load(latent + n * stride_latent + c, mask=c < LATENT, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps)
        value = value * scale * tl.load(weight + c, mask=c < LATENT, other=0.0).to(tl.float32)
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        tl.store(row + c, value.to(kv_pool.dtype.element_ty), mask=c < LATENT)
        target = row + LATENT + 2 * half
    tl.store(target, turned.to(kv_pool.dtype.element_ty), mask=inside)
    tl.store(target + 1, other.to(kv_pool.dtype.element_ty), mask=inside)


def mla_decode(q_lat: Tensor, q_pe: Tensor, kv_pool: Tensor, ctx: PagedContext, scale: float) -> Tensor:
    """reference.mla_decode; probabilities are rounded to the model dtype before they meet the values."""
    (rows, heads, latent), rope, bs, width = q_lat.shape, q_pe.shape[-1], ctx.seq_lens.shape[0], ctx.width
    part_out = torch.empty(bs, PROGRAMS, width * heads, latent, dtype=torch.float32, device=q_lat.device)
    part_ml = torch.empty(bs, PROGRAMS, width * heads, 2, dtype=torch.float32, device=q_lat.device)
    out = torch.empty(rows, heads, latent, dtype=q_lat.dtype, device=q_lat.device)
    _split_kernel[(PROGRAMS, triton.cdiv(width * heads, ROW_TILE), bs)](
        (q_lat, q_pe), (*q_lat.stride()[:2], *q_pe.stride()[:2]), kv_pool, ctx.req_to_token, ctx.req_pool_indices,
        ctx.seq_lens, (part_out, part_ml), ctx.req_to_token.stride(0), scale * LOG2E, width,
        H=heads, LATENT=latent, ROPE=rope, BL=max(16, triton.next_power_of_2(latent)),
        BR=max(16, triton.next_power_of_2(rope)), BM=ROW_TILE, BN=KV_TILE, SPLIT=SPLIT, P=PROGRAMS,
        num_warps=8, num_stages=2, **launch_pdl(q_lat),
    )  # fmt: skip
    columns = min(COMBINE_COLUMNS, triton.next_power_of_2(latent))
    _combine_kernel[(width * heads, triton.cdiv(latent, columns), bs)](
        part_out, part_ml, ctx.req_pool_indices, ctx.seq_lens, out, width,
        H=heads, LATENT=latent, SPLIT=SPLIT, P=PROGRAMS, BC=columns, num_warps=4, **launch_pdl(q_lat),
    )  # fmt: skip
    return out


def per_head(x: Tensor, w: Tensor) -> Tensor:
    """x [N, H, I] (unit column stride) times w [H, I, O] head by head -> contiguous [N, H, O]."""
    (count, heads, inner), outputs = x.shape, w.shape[2]
    out = torch.empty(count, heads, outputs, dtype=x.dtype, device=x.device)
    bm = 16 if count <= 16 else 32
    bn = 16 if outputs <= 128 else 64
    _per_head_kernel[(triton.cdiv(outputs, bn), heads, triton.cdiv(count, bm))](
        x, w, out, count, x.stride(0), x.stride(1), H=heads, IN=inner, OUT=outputs, BM=bm, BN=bn, BK=64,
        num_warps=4, num_stages=4, **launch_pdl(x),
    )  # fmt: skip
    return out


def head_gate(o: Tensor, gate_logits: Tensor) -> Tensor:
    """reference.head_gate for contiguous o; rows of the gate may be strided."""
    count, heads, dim = o.shape
    out = torch.empty(count, heads * dim, dtype=o.dtype, device=o.device)
    _head_gate_kernel[(count, heads)](
        o, gate_logits, out, gate_logits.stride(0),
        H=heads, V=dim, BLOCK=triton.next_power_of_2(dim), num_warps=1, **launch_pdl(o),
    )  # fmt: skip
    return out


def prepare(
    pe: Tensor, latent: Tensor, norm: tuple[Tensor, float], rotary: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
) -> Tensor:
    """reference.prepare in one node; rows of pe and latent may be strided."""
    (weight, eps), (positions, table), (kv_pool, loc) = norm, rotary, cache
    rows, heads, rope = pe.shape[0], pe.shape[1] - 1, pe.shape[2]
    q_pe = torch.empty(rows, heads, rope, dtype=pe.dtype, device=pe.device)
    _prepare_kernel[(rows, heads + 1)](
        pe, latent, weight, positions, table, kv_pool, loc, q_pe, pe.stride(0), latent.stride(0), eps,
        H=heads, LATENT=latent.shape[1], ROPE=rope, BL=triton.next_power_of_2(latent.shape[1]),
        BR=triton.next_power_of_2(rope), num_warps=1, **launch_pdl(pe),
    )  # fmt: skip
    return q_pe
