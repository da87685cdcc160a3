"""Latent attention in CUDA C++: bindings of prepare.cu, split.cu and finish.cu, and what they cannot take.

Decode walks fixed splits of ``SPLIT`` positions from position 0. Up to ``PROGRAMS`` splits have a program each, beyond
that they are dealt round robin; how many programs are launched and how many CTAs share the rows changes no bit.
"""

import itertools

import torch
from torch import Tensor

from sgling_kernel import cuda
from sgling_kernel.cuda.operands import why_not_dense, why_not_rows
from sgling_kernel.mla.context import LOG2E, PROGRAMS, SPLIT, PagedContext

NOPE, LATENT, ROPE, VALUE = 128, 512, 64, 128


def _why_not_rows(name: str, rows: Tensor, inner: tuple[int, ...], apart: int) -> str | None:
    """Reason why bf16 rows [N, *inner] are not dense but for the distance of rows, a multiple of ``apart`` bytes."""
    if rows.shape[1:] != inner:
        return f"{name} has rows of {tuple(rows.shape[1:])}, not {inner}"
    if not rows[:1].is_contiguous():
        return f"rows of {name} are not dense"
    return why_not_rows(name, rows.flatten(1), apart)


def _why_not_dense(**tensors: Tensor) -> str | None:
    """Reason why one of the tensors is not dense bf16."""
    return next(filter(None, itertools.starmap(why_not_dense, tensors.items())), None)


def _finish_cut(device: torch.device, rows: int) -> tuple[int, int]:
    """CTAs of a head in finish.cu, and rows that share the projection's weights, as measured on an H200 at 1, 6, 9 and
    17 rows. No bit depends on them."""
    if device.type == "cpu" or cuda.has_clusters():
        return 4, 2 if 3 < rows <= 6 else 3
    return 1, 1


def why_not_prepare(q_nope: Tensor, w_kc: Tensor, pe: Tensor, latent: Tensor, weight: Tensor, kv: Tensor) -> str | None:
    """Reason why prepare.cu cannot take the operands, or None."""
    heads = q_nope.shape[1]
    if w_kc.shape != (heads, NOPE, LATENT):
        return f"w_kc has the shape {tuple(w_kc.shape)}, not [heads, {NOPE}, {LATENT}]"
    return (
        cuda.why_not()
        or _why_not_rows("q_nope", q_nope, (heads, NOPE), 16)
        or _why_not_rows("pe", pe, (heads + 1, ROPE), 4)
        or _why_not_rows("latent", latent, (LATENT,), 2)
        or _why_not_dense(w_kc=w_kc, norm=weight, cache=kv)
    )


def why_not_decode(
    q_lat: Tensor, q_pe: Tensor, kv: Tensor, ctx: PagedContext, w_vc: Tensor, gate: Tensor
) -> str | None:
    """Reason why split.cu and finish.cu cannot take the operands, or None."""
    heads = q_lat.shape[1]
    if (q_lat.shape[2], q_pe.shape[2]) != (LATENT, ROPE) or w_vc.shape != (heads, LATENT, VALUE):
        return f"latent {q_lat.shape[2]}, rope {q_pe.shape[2]}, w_vc {tuple(w_vc.shape)}: no such shape is compiled"
    if ctx.req_to_token.dtype != torch.int64 or not ctx.seq_lens.is_contiguous():
        return "the page table is not int64 or the lengths are not contiguous"
    return (
        cuda.why_not()
        or _why_not_dense(q_lat=q_lat, q_pe=q_pe, cache=kv, w_vc=w_vc)
        or _why_not_rows("gate", gate, (heads,), 2)
    )


def prepare_absorbed(
    q_nope: Tensor,
    w_kc: Tensor,
    pe: Tensor,
    latent: Tensor,
    norm: tuple[Tensor, float],
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """mla.prepare_absorbed in one node."""
    (weight, eps), (positions, table), (kv_pool, loc) = norm, rotary, cache
    rows, heads = q_nope.shape[:2]
    q_lat = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=q_nope.device)
    q_pe = torch.empty(rows, heads, ROPE, dtype=torch.bfloat16, device=q_nope.device)
    called = cuda.function("mla/prepare.cu", "mla_prepare")
    strides = (q_nope.stride(0), pe.stride(0), latent.stride(0))
    operands = (q_nope, w_kc, pe, latent, weight, *strides, eps, positions, table, kv_pool, loc)
    cuda.launch(called, *operands, q_lat, q_pe, rows, heads)
    return q_lat, q_pe


def mla_decode_gated(
    q_lat: Tensor, q_pe: Tensor, kv_pool: Tensor, ctx: PagedContext, scale: float, w_vc: Tensor, gate_logits: Tensor
) -> Tensor:
    """mla.mla_decode_gated in two nodes: the splits; their combination, values and gate."""
    rows, heads = q_lat.shape[:2]
    batch, width, device = ctx.seq_lens.shape[0], ctx.width, q_lat.device
    programs = max(1, min(PROGRAMS, -(-min(ctx.kv_bound, ctx.req_to_token.shape[1]) // SPLIT)))
    part_out = torch.empty(batch, programs, width * heads, LATENT, dtype=torch.float32, device=device)
    part_ml = torch.empty(batch, programs, width * heads, 2, dtype=torch.float32, device=device)
    out = torch.empty(rows, heads * VALUE, dtype=torch.bfloat16, device=device)
    split = cuda.function("mla/split.cu", "mla_split")
    groups = 2 if batch == 1 and width * heads > 8 else 1
    table = (ctx.req_to_token, ctx.req_to_token.stride(0), ctx.req_pool_indices, ctx.seq_lens)
    sizes, ahead = (batch, width, heads, programs), (w_vc, w_vc.nbytes)
    work = (*sizes, groups, int(ctx.early), *ahead)
    cuda.launch(split, q_lat, q_pe, kv_pool, *table, part_out, part_ml, scale * LOG2E, *work)
    finish = cuda.function("mla/finish.cu", "mla_finish")
    gate = (gate_logits, gate_logits.stride(0))
    cut = _finish_cut(device, rows)
    cuda.launch(finish, part_out, part_ml, ctx.req_pool_indices, ctx.seq_lens, w_vc, *gate, out, *sizes, *cut)
    return out
