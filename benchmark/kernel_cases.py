"""The decode operators that benchmark/kernels.py measures, at the shapes of one of four tensor-parallel ranks.

A case makes its operands for m rows and says what one call moves. To add an operator: write a function from ``m`` to
:class:`Operands` and name it in :data:`CASES`. The op under test is the public one; which kernel serves is decided by
``dispatch`` and its switches, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sgling_kernel.embedding import embed_norm
from sgling_kernel.kda import KDAParams, ReplayRing, kda_decode, kda_verify_replay
from sgling_kernel.linear import gated_linear, linear, linear_fp32
from sgling_kernel.logits import argmax_lowest, best_of_product
from sgling_kernel.mla import PagedContext, mla_decode_gated, prepare_absorbed
from sgling_kernel.moe import ExpertWeights, combine, combine_add_rms_norm, dense_ffn, experts_with_shared
from sgling_kernel.moe.reference import swiglu
from sgling_kernel.norm import fused_add_rms_norm
from sgling_kernel.norm.reference import gated_rms_norm
from sgling_kernel.router import RouterConfig, add_rms_norm_router, grouped_topk
from sgling_kernel.router.reference import grouped_topk as eager_topk

HIDDEN, HEADS, HEAD_DIM, VOCAB = 2560, 8, 128, 39296
EXPERTS, WIDTH, FFN = 512, 192, 1536
LATENT, ROPE, CONTEXT = 512, 64, 8192
ROUTER = RouterConfig(n_group=8, topk_group=4, top_k=8, norm_topk_prob=True, routed_scaling_factor=2.5)
EPS, COLD_BYTES, MIN_COPIES = 1e-6, 300e6, 8


class Operands(NamedTuple):
    """What the calls of one measurement use.

    Attributes:
        bytes: moved by one call when nothing is cached.
        copies: one tuple of arguments per copy of the cold operands; calls take them in turn.
        op: the operator.
        library: the same product from torch's libraries with the same arguments, None where there is none.
    """

    bytes: float
    copies: list[tuple[Any, ...]]
    op: Callable[..., Any]
    library: Callable[..., Any] | None = None


def copies_of(cold_bytes: float) -> int:
    """Copies that keep an operand of that size out of every cache."""
    return max(MIN_COPIES, int(-(-COLD_BYTES // cold_bytes)))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Tensor:
    """Random operand on the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(std=std)


def _fp32_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w.t(), out_dtype=torch.float32)


def product(outputs: int, width: int, fp32: bool = False) -> Callable[[int], Operands]:
    """A dense product with a cold weight."""

    def make(m: int) -> Operands:
        x, size = normal(m, width), 2.0 * outputs * width
        copies = [(x, normal(outputs, width, std=width**-0.5)) for _ in range(copies_of(size))]
        moved = size + 2 * m * width + (4 if fp32 else 2) * m * outputs
        ops = (linear_fp32, _fp32_product) if fp32 else (linear, F.linear)
        return Operands(moved, copies, *ops)

    return make


def gated_product(m: int) -> Operands:
    """KDA's gated norm and o_proj; the library alternative is the norm in torch and cuBLAS."""
    width = HEADS * HEAD_DIM
    o, z, norm = normal(m, HEADS, HEAD_DIM), normal(m, width), normal(HEAD_DIM)
    size = 2.0 * HIDDEN * width
    copies = [(o, z, norm, EPS, normal(HIDDEN, width, std=width**-0.5)) for _ in range(copies_of(size))]

    def library(o, z, norm, eps, w):
        return F.linear(gated_rms_norm(o, z, norm, eps).flatten(1), w)

    return Operands(size + 4 * m * width + 2 * m * HIDDEN, copies, gated_linear, library)


def ffn(m: int) -> Operands:
    """The dense FFN of the first layers: up, SwiGLU, down."""
    x, size = normal(m, HIDDEN), 6.0 * FFN * HIDDEN
    copies = [
        (x, normal(2 * FFN, HIDDEN, std=HIDDEN**-0.5), normal(HIDDEN, FFN, std=FFN**-0.5), None)
        for _ in range(copies_of(size))
    ]

    def library(x, w13, w2, limit):
        return F.linear(swiglu(F.linear(x, w13), limit), w2)

    return Operands(size + 4 * m * HIDDEN + 12 * m * FFN, copies, dense_ffn, library)


def add_norm(m: int) -> Operands:
    """Residual add and norm."""
    copies = [(normal(m, HIDDEN), normal(m, HIDDEN), normal(HIDDEN), EPS) for _ in range(MIN_COPIES)]

    def library(x, residual, weight, eps):
        total = x + residual
        return F.rms_norm(total, (HIDDEN,), weight, eps), total

    return Operands(8.0 * m * HIDDEN, copies, fused_add_rms_norm, library)


def norm_router(m: int) -> Operands:
    """Residual add, norm and the router's product."""
    size = 2.0 * EXPERTS * HIDDEN
    x, residual, norm = normal(m, HIDDEN), normal(m, HIDDEN), normal(HIDDEN)
    copies = [(x, residual, norm, EPS, normal(EXPERTS, HIDDEN, std=HIDDEN**-0.5)) for _ in range(copies_of(size))]

    def library(x, residual, norm, eps, w):
        total = x + residual
        normed = F.rms_norm(total, (HIDDEN,), norm, eps)
        return normed, total, _fp32_product(normed, w)

    return Operands(size + 8.0 * m * HIDDEN + 4.0 * m * EXPERTS, copies, add_rms_norm_router, library)


def topk(m: int) -> Operands:
    """Grouped top-k of the router."""
    copies = [
        (normal(m, EXPERTS, dtype=torch.float32), normal(EXPERTS, dtype=torch.float32, std=0.01), ROUTER)
        for _ in range(MIN_COPIES)
    ]
    return Operands(4.0 * m * EXPERTS, copies, grouped_topk, eager_topk)


def _layer() -> tuple[ExpertWeights, ExpertWeights]:
    """(routed, shared) expert weights of one layer."""
    routed = ExpertWeights(
        normal(EXPERTS, 2 * WIDTH, HIDDEN, std=HIDDEN**-0.5), normal(EXPERTS, HIDDEN, WIDTH, std=WIDTH**-0.5), None
    )
    return routed, ExpertWeights(
        normal(2 * WIDTH, HIDDEN, std=HIDDEN**-0.5), normal(HIDDEN, WIDTH, std=WIDTH**-0.5), None
    )


def _eager_experts(x, experts, shared, weights, ids):
    """Gathered weights and batched products."""
    gu = torch.einsum("nd,nkid->nki", x, experts.w13[ids])
    down = torch.einsum("nki,nkdi->nkd", swiglu(gu, None), experts.w2[ids])
    routed = (down.float() * weights[..., None]).sum(1).to(x.dtype)
    return routed + F.linear(swiglu(F.linear(x, shared.w13), None), shared.w2)


def _experts(m: int, op: Callable[..., Any], library: Callable[..., Any] | None, *more: Any) -> Operands:
    x, copies, distinct = normal(m, HIDDEN), [], 0
    for _ in range(MIN_COPIES):
        ids = torch.stack([torch.randperm(EXPERTS, device="cuda")[: ROUTER.top_k] for _ in range(m)])
        distinct += len(ids.unique())
        copies.append((x, *_layer(), torch.rand(m, ROUTER.top_k, device="cuda"), ids, *more))
    moved = (distinct / MIN_COPIES + 1) * 6.0 * WIDTH * HIDDEN
    return Operands(moved, copies, op, library)


def experts(m: int) -> Operands:
    """Routed and shared experts under uniform routing, summed."""
    return _experts(m, lambda *layer: combine(experts_with_shared(*layer)), _eager_experts)


def experts_and_norm(m: int) -> Operands:
    """The same with the residual add and norm that follow, which may take the sum over experts over."""

    def op(x, routed, shared, weights, ids, residual, norm):
        outputs = experts_with_shared(x, routed, shared, weights, ids)
        if isinstance(outputs, Tensor):
            return fused_add_rms_norm(outputs, residual, norm, EPS)
        return combine_add_rms_norm(outputs, residual, norm, EPS)

    return _experts(m, op, None, normal(m, HIDDEN), normal(HIDDEN))


def kda(m: int) -> Operands:
    """Conv, gates and recurrence: one decode step (state written), or the verify of one window (state read)."""
    channels, slots, ring = 3 * HEADS * HEAD_DIM, copies_of(4.0 * HEADS * HEAD_DIM**2), 64
    params = KDAParams(
        normal(channels, 4, dtype=torch.float32), normal(HEADS, dtype=torch.float32),
        normal(HEADS, HEAD_DIM, dtype=torch.float32), -5.0,
    )  # fmt: skip
    rows = (normal(m, channels), normal(m, HEADS * HEAD_DIM), normal(m, HEADS))
    pools = (
        normal(slots + 1, 3, channels),
        normal(slots + 1, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32, std=0.05),
    )
    held = (slots + 1, ring, HEADS, HEAD_DIM)
    store = ReplayRing(
        normal(slots + 1, ring, channels), normal(*held), normal(*held), normal(*held, dtype=torch.float32),
        normal(*held[:-1], dtype=torch.float32),
    )  # fmt: skip
    lens = torch.tensor([CONTEXT], device="cuda")
    own = [torch.tensor([slot], device="cuda") for slot in range(1, slots + 1)]
    size = 4.0 * HEADS * HEAD_DIM**2
    if m == 1:
        return Operands(2 * size, [(*rows, params, *pools, slot) for slot in own], kda_decode)
    return Operands(size, [(*rows, params, *pools, slot, lens, m, store) for slot in own], kda_verify_replay)


def mla_prepare(m: int) -> Operands:
    """Absorbed queries, rotation, latent norm and cache write."""
    sizes, size = (HEADS * HEAD_DIM, (HEADS + 1) * ROPE, LATENT), 2.0 * HEADS * HEAD_DIM * LATENT
    q_nope, pe, latent = normal(m, sum(sizes) + HEADS)[:, : sum(sizes)].split(sizes, -1)
    q_nope, pe = q_nope.unflatten(-1, (HEADS, HEAD_DIM)), pe.unflatten(-1, (-1, ROPE))
    positions = torch.arange(m, device="cuda")
    rotary = (positions, normal(m, ROPE // 2, 2, dtype=torch.float32))
    cache = (normal(m + 1, LATENT + ROPE), positions + 1)
    rest = (pe, latent, (normal(LATENT), EPS), rotary, cache)
    copies = [(q_nope, normal(HEADS, HEAD_DIM, LATENT), *rest) for _ in range(copies_of(size))]
    return Operands(size, copies, prepare_absorbed)


def mla(m: int) -> Operands:
    """Latent attention of one window over 8K positions, values and head gate."""
    size = 2.0 * CONTEXT * (LATENT + ROPE)
    count, span = copies_of(size), CONTEXT + 64
    pool = normal(count * span + 1, LATENT + ROPE)
    table = torch.arange(count * span, device="cuda").view(count, span) + 1
    table = torch.cat((torch.zeros_like(table[:1]), table))
    queries = (normal(m, HEADS, LATENT), normal(m, HEADS, ROPE))
    output, scale = (normal(HEADS, LATENT, HEAD_DIM, std=LATENT**-0.5), normal(m, HEADS)), 192**-0.5
    lens = torch.tensor([CONTEXT - m], device="cuda")
    own = [torch.tensor([row], device="cuda") for row in range(1, count + 1)]
    copies = [(*queries, pool, PagedContext(table, row, lens, m, CONTEXT, early=True), scale, *output) for row in own]

    def library(q_lat, q_pe, pool, ctx, scale, w_vc, gate):
        kv = pool[ctx.slots()[0]][None, None]
        q = torch.cat((q_lat, q_pe), -1).transpose(0, 1)[None]
        mask = torch.arange(kv.shape[2], device="cuda") <= ctx.last_visible().t()
        out = F.scaled_dot_product_attention(q, kv, kv[..., :LATENT], mask, scale=scale, enable_gqa=True)
        return (torch.bmm(out[0], w_vc).transpose(0, 1) * gate.sigmoid()[..., None]).flatten(1)

    return Operands(size + 2.0 * HEADS * LATENT * HEAD_DIM, copies, mla_decode_gated, library)


def embedding(m: int) -> Operands:
    """Token embedding with the first norm."""
    table, norm = normal(4 * VOCAB, HIDDEN), (normal(HIDDEN), EPS)
    copies = [(torch.randint(0, 4 * VOCAB, (m,), device="cuda"), table, norm) for _ in range(MIN_COPIES)]

    def library(ids, table, norm):
        rows = F.embedding(ids, table)
        return rows, F.rms_norm(rows, (HIDDEN,), *norm)

    return Operands(6.0 * m * HIDDEN, copies, embed_norm, library)


def argmax(m: int) -> Operands:
    """Greedy token of a vocabulary shard."""
    copies = [(normal(m, VOCAB, dtype=torch.float32),) for _ in range(MIN_COPIES)]
    return Operands(4.0 * m * VOCAB, copies, argmax_lowest, lambda scores: scores.max(-1))


def best_token(m: int) -> Operands:
    """Greedy token of a drafter: lm_head and arg-max."""
    x, size = normal(m, HIDDEN), 2.0 * VOCAB * HIDDEN
    out = torch.empty(m, dtype=torch.int64, device="cuda")
    copies = [(x, normal(VOCAB, HIDDEN, std=HIDDEN**-0.5), 0, out) for _ in range(copies_of(size))]
    return Operands(size, copies, best_of_product, lambda x, w, start, out: _fp32_product(x, w).max(-1))


CASES: dict[str, Callable[[int], Operands]] = {
    "kda.in_proj": product(5128, HIDDEN),
    "kda.o_proj": product(HIDDEN, HEADS * HEAD_DIM),
    "kda.gated_o_proj": gated_product,
    "mla.in_proj": product(2120, HIDDEN),
    "ffn.up": product(2 * FFN, HIDDEN),
    "ffn.down": product(HIDDEN, FFN),
    "ffn": ffn,
    "moe.router": product(EXPERTS, HIDDEN, fp32=True),
    "nextn.eh_proj": product(HIDDEN, 2 * HIDDEN),
    "lm_head": product(VOCAB, HIDDEN, fp32=True),
    "nextn.best_token": best_token,
    "norm.add_rms": add_norm,
    "moe.norm_router": norm_router,
    "moe.topk": topk,
    "moe.experts": experts,
    "moe.experts_norm": experts_and_norm,
    "kda.recurrence": kda,
    "mla.prepare": mla_prepare,
    "mla.attention": mla,
    "embedding": embedding,
    "argmax": argmax,
}
