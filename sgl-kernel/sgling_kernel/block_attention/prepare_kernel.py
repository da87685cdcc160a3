"""Norm, rotation and cache write of draft block rows and injected features in one Triton node (see reference.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.block_attention.reference import RowRotary
from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait


@triton.jit
def _angle(table, position, c, DIM: tl.constexpr, NEOX: tl.constexpr):
    """(partner dimension, cos, signed sin) of every dimension of a head; behind DIM nothing turns."""
    inside = c < DIM
    if NEOX:
        partner = tl.where(c < DIM // 2, c + DIM // 2, c - DIM // 2)
        pair, first = c % (DIM // 2), c < DIM // 2
    else:
        partner = c ^ 1
        pair, first = c // 2, c % 2 == 0
    at = table + position * DIM + 2 * pair
    cos, sin = tl.load(at, mask=inside, other=1.0), tl.load(at + 1, mask=inside, other=0.0)
    return tl.where(inside, partner, c), cos, tl.where(first, -sin, sin)


@triton.jit
def _block_heads_kernel(
    x, weight_q, weight_k, positions, table, loc, buffer, out, stride_x, stride_layer, stride_cache, stride_slot, eps,
    H: tl.constexpr, KVH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, DIM: tl.constexpr, NEOX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, h, layer): heads in the order of x; queries go to ``out``, keys and values to the layer's cache."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    n, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    layers = tl.num_programs(2)
    c = tl.arange(0, BD)
    mask = c < D
    at = x + n * stride_x + layer * stride_layer + head * D
    value = tl.load(at + c, mask=mask, other=0.0)
    target = buffer + layer * stride_cache + tl.load(loc + n) * stride_slot + (head - H) * D
    if head < H:
        target = out + ((n * layers + layer) * H + head) * D
    if head < H + KVH:
        partner, cos, sin = _angle(table, tl.load(positions + n), c, DIM, NEOX)
        weight = weight_k + layer * D
        if head < H:
            weight = weight_q
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
        other = tl.load(at + partner, mask=mask, other=0.0).to(tl.float32)
        own = wide * scale * tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
        other = other * scale * tl.load(weight + partner, mask=mask, other=0.0).to(tl.float32)
        own, other = own.to(value.dtype).to(tl.float32), other.to(value.dtype).to(tl.float32)
        value = (own * cos + other * sin).to(value.dtype)
    tl.store(target + c, value, mask=mask)


@triton.jit
def _block_latent_kernel(
    pe, latent, weight, positions, table, loc, buffer, out, strides_pe, strides_latent, stride_cache, stride_slot, eps,
    H: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, NEOX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (n, h < H, layer) rotates a query head; h = H rotates the key, normalises the latent and stores both."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    n, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    layers = tl.num_programs(2)
    c = tl.arange(0, BR)
    inside = c < ROPE
    at = pe + n * strides_pe[0] + layer * strides_pe[1] + head * ROPE
    partner, cos, sin = _angle(table, tl.load(positions + n), c, ROPE, NEOX)
    own = tl.load(at + c, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner, mask=inside, other=0.0).to(tl.float32)
    turned = own * cos + other * sin
    target = out + ((n * layers + layer) * H + head) * ROPE
    if head == H:
        row = buffer + layer * stride_cache + tl.load(loc + n) * stride_slot
        k = tl.arange(0, BL)
        from_at = latent + n * strides_latent[0] + layer * strides_latent[1] + k
        value = tl.load(from_at, mask=k < LATENT, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps)
        value = value * scale * tl.load(weight + layer * LATENT + k, mask=k < LATENT, other=0.0).to(tl.float32)
        tl.store(row + k, value.to(buffer.dtype.element_ty), mask=k < LATENT)
        target = row + LATENT
    tl.store(target + c, turned.to(buffer.dtype.element_ty), mask=inside)


def prepare_heads(
    x: Tensor, norms: tuple[Tensor, Tensor, float], rotary: RowRotary, cache: tuple[Tensor, Tensor]
) -> Tensor:
    """reference.prepare_heads; rows and layers of x may be strided."""
    (weight_q, weight_k, eps), (buffer, loc) = norms, cache
    rows, layers, dim = x.shape[0], x.shape[1], weight_k.shape[1]
    count, own = x.shape[2] // dim, buffer.shape[-1] // dim
    out = torch.empty(rows, layers * (count - own), dim, dtype=x.dtype, device=x.device)
    _block_heads_kernel[(rows, count, layers)](
        x, weight_q, weight_k, rotary.positions, rotary.table, loc, buffer, out, x.stride(0), x.stride(1),
        buffer.stride(0), buffer.stride(1), eps, H=count - own, KVH=own // 2, D=dim, BD=triton.next_power_of_2(dim),
        DIM=2 * rotary.table.shape[1], NEOX=rotary.neox, num_warps=1, **launch_pdl(x),
    )  # fmt: skip
    return out


def prepare_latent(
    pe: Tensor, latent: Tensor, norm: tuple[Tensor, float], rotary: RowRotary, cache: tuple[Tensor, Tensor]
) -> Tensor:
    """reference.prepare_latent; rows and layers of pe and latent may be strided."""
    (weight, eps), (buffer, loc) = norm, cache
    rows, layers, heads, rope = pe.shape
    out = torch.empty(rows, layers * (heads - 1), rope, dtype=pe.dtype, device=pe.device)
    _block_latent_kernel[(rows, heads, layers)](
        pe, latent, weight, rotary.positions, rotary.table, loc, buffer, out, pe.stride()[:2], latent.stride()[:2],
        buffer.stride(0), buffer.stride(1), eps, H=heads - 1, LATENT=latent.shape[-1], ROPE=rope,
        BL=triton.next_power_of_2(latent.shape[-1]), BR=triton.next_power_of_2(rope), NEOX=rotary.neox, num_warps=1,
        **launch_pdl(pe),
    )  # fmt: skip
    return out
