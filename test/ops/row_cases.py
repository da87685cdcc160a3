"""Row invariance of decode operators: the cases and the check, for the emulation and for a GPU.

The contract: a row's bits depend on that row alone, for any number of rows up to ``dispatch.SMALL_ROWS``, any place
among them and any neighbours. One draw of bf16 outputs hides most violations, so operators are looked at through their
fp32 outputs where they have any, and many rows are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ops.kda_case import make_params, make_pools, make_rows, make_store, same_bits
from sgling_kernel.embedding import embed_norm, embed_pair
from sgling_kernel.kda import kda_decode, kda_verify_replay
from sgling_kernel.linear import gated_linear, linear, linear_fp32
from sgling_kernel.logits import argmax_lowest, best_of_product
from sgling_kernel.mla import PagedContext, mla_decode_gated, prepare_absorbed
from sgling_kernel.moe import (
    ExpertOutputs,
    ExpertWeights,
    combine,
    combine_add_rms_norm,
    experts_with_shared,
    swiglu,
)
from sgling_kernel.norm import fused_add_rms_norm, gated_rms_norm, rms_norm
from sgling_kernel.rotary import rope_table
from sgling_kernel.router import RouterConfig, add_rms_norm_router, grouped_topk

BF16, EPS, LATENT, ROPE = torch.bfloat16, 1e-6, 512, 64


class Sizes(NamedTuple):
    """Shapes a suite runs at: (outputs, width) of products, (outputs, heads) of gated products, and the model's."""

    products: tuple[tuple[int, int], ...]
    gated: tuple[tuple[int, int], ...]
    heads: int
    hidden: int
    experts: int
    expert_width: int
    vocab: int


class RowCase(NamedTuple):
    """One operator over a pool of rows.

    Attributes:
        rows: row inputs, every first dimension the size of the pool.
        call: row inputs of some rows -> outputs, rows first.
    """

    rows: tuple[Tensor, ...]
    call: Callable[..., tuple[Tensor, ...]]


def check_rows(case: RowCase, counts: tuple[int, ...], draws: int) -> None:
    """Rows alone, then ``draws`` random choices of every count in random order, then beside rows of NaN."""
    pool = case.rows[0].shape[0]
    alone = [case.call(*(rows[i : i + 1].clone() for rows in case.rows)) for i in range(pool)]
    alone = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for count in counts:
        for draw in range(draws):
            picked = torch.randperm(pool)[:count]
            rows = [rows[picked] for rows in case.rows]
            mine = torch.ones(count, dtype=torch.bool)
            if draw % 2:  # neighbours that poison whatever they touch
                mine = torch.rand(count) < 0.5
                rows = [poisoned(x, ~mine) for x in rows]
            for got, want in zip(case.call(*rows), alone, strict=True):
                assert same_bits(got[mine], want[picked][mine]), f"{count} rows, draw {draw}"


def poisoned(rows: Tensor, which: Tensor) -> Tensor:
    """A copy with NaN in the chosen rows of floating-point inputs; ids stay what they are."""
    if not rows.is_floating_point():
        return rows
    rows = rows.clone()
    rows[which] = float("nan")
    return rows


def _normal(*shape: int, dtype: torch.dtype = BF16, std: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * std).to(dtype)


def _weight(outputs: int, width: int) -> Tensor:
    return _normal(outputs, width, std=width**-0.5)


def row_cases(sizes: Sizes, pool: int) -> dict[str, Callable[[], RowCase]]:
    """Every row-wise operator by name; operands are made when a case is asked for."""
    cases: dict[str, Callable[[], RowCase]] = {}
    for outputs, width in sizes.products:
        cases[f"linear {outputs}x{width}"] = lambda o=outputs, k=width: _product(o, k, pool)
    for outputs, heads in sizes.gated:
        cases[f"gated {outputs}x{heads}"] = lambda o=outputs, h=heads: _gated(o, h, pool)
    cases["best of a product"] = lambda: _best_of_product(sizes.vocab, sizes.hidden, pool)
    cases["norms"] = lambda: _norms(sizes.hidden, pool)
    cases["router with norm"] = lambda: _norm_router(sizes.experts, sizes.hidden, pool)
    cases["top-k"] = lambda: _topk(sizes.experts, pool)
    cases["experts"] = lambda: _experts(sizes, pool)
    cases["swiglu"] = lambda: RowCase((_normal(pool, 2 * sizes.expert_width),), lambda gu: (swiglu(gu, 0.5),))
    cases["embedding"] = lambda: _embedding(sizes.hidden, sizes.vocab, pool)
    cases["latent queries"] = lambda: _latent_queries(sizes.heads, pool)
    cases["arg-max"] = lambda: RowCase(
        (_normal(pool, sizes.vocab, dtype=torch.float32).round(decimals=1),), argmax_lowest
    )
    return cases


def _scores(pool: int, columns: int) -> Tensor:
    """fp32 scores with many ties."""
    return torch.randn(pool, columns).round(decimals=1)


def _product(outputs: int, width: int, pool: int) -> RowCase:
    w = _weight(outputs, width)
    return RowCase((_normal(pool, width),), lambda x: (linear_fp32(x, w), linear(x, w)))


def _best_of_product(outputs: int, width: int, pool: int) -> RowCase:
    w = _weight(outputs, width)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty(len(x), dtype=torch.int64)
        best_of_product(x, w, 0, out)
        return (out,)

    return RowCase((_normal(pool, width),), call)


def _gated(outputs: int, heads: int, pool: int) -> RowCase:
    w, norm = _weight(outputs, heads * 128), _normal(128)
    rows = (_normal(pool, heads, 128, std=0.3), _normal(pool, heads * 128))
    return RowCase(rows, lambda o, z: (gated_linear(o, z, norm, EPS, w),))


def _norms(hidden: int, pool: int) -> RowCase:
    weight, head_weight = _normal(hidden), _normal(128)
    rows = (_normal(pool, hidden), _normal(pool, hidden), _normal(pool, 2, 128), _normal(pool, 256))

    def call(x, residual, o, z):
        return (rms_norm(x, weight, EPS), *fused_add_rms_norm(x, residual, weight, EPS),
                gated_rms_norm(o, z, head_weight, EPS))  # fmt: skip

    return RowCase(rows, call)


def _norm_router(experts: int, hidden: int, pool: int) -> RowCase:
    norm, w = _normal(hidden), _weight(experts, hidden)
    rows = (_normal(pool, hidden), _normal(pool, hidden))
    return RowCase(rows, lambda x, residual: add_rms_norm_router(x, residual, norm, EPS, w))


def _topk(experts: int, pool: int) -> RowCase:
    config = RouterConfig(8, 4, 8, True, 2.5)
    bias = _normal(experts, dtype=torch.float32, std=0.01)
    return RowCase((_scores(pool, experts),), lambda rows: grouped_topk(rows, bias, config))


def _experts(sizes: Sizes, pool: int) -> RowCase:
    count, width, hidden = sizes.experts, sizes.expert_width, sizes.hidden
    routed = ExpertWeights(
        _normal(count, 2 * width, hidden, std=hidden**-0.5), _normal(count, hidden, width, std=width**-0.5), 0.4
    )
    shared = ExpertWeights(_weight(2 * width, hidden), _weight(hidden, width), 0.7)
    norm = _normal(hidden)
    popular = torch.arange(min(count, 24))  # more than 16 rows of an expert meet
    ids = torch.stack([popular[torch.randperm(len(popular))[:8]] for _ in range(pool)])
    rows = (_normal(pool, hidden), torch.rand(pool, 8), ids, _normal(pool, hidden))

    def call(x, weights, ids, residual):
        outputs = experts_with_shared(x, routed, shared, weights, ids)
        if not isinstance(outputs, ExpertOutputs):
            return (outputs,)
        return (combine_add_rms_norm(outputs, residual, norm, EPS)[0], outputs.values, combine(outputs))

    return RowCase(rows, call)


def _embedding(hidden: int, vocab: int, pool: int) -> RowCase:
    table, norms = _normal(vocab, hidden), ((_normal(hidden), EPS), (_normal(hidden), EPS))

    def call(ids, rows):
        return (*embed_norm(ids, table, norms[0]), embed_pair(ids, table, norms[0], rows, norms[1]))

    return RowCase((torch.randint(0, vocab, (pool,)), _normal(pool, hidden)), call)


def _latent_queries(heads: int, pool: int) -> RowCase:
    """Absorbed and rotated queries, and the cache rows that are written beside them."""
    w_kc, norm = _normal(heads, 128, LATENT, std=128**-0.5), (_normal(LATENT), EPS)
    table = rope_table(4096, ROPE, 6e6, w_kc.device)
    rows = (
        _normal(pool, heads, 128), _normal(pool, heads + 1, ROPE), _normal(pool, LATENT),
        torch.randint(0, 4096, (pool,)),
    )  # fmt: skip

    def call(q_nope, pe, latent, positions):
        slots = torch.randperm(pool)[: len(positions)] + 1
        cache = torch.zeros(pool + 1, LATENT + ROPE, dtype=BF16)
        queries = prepare_absorbed(q_nope, w_kc, pe, latent, norm, (positions, table), (cache, slots))
        return (*queries, cache[slots])

    return RowCase(rows, call)


def check_kda(heads: int, dim: int, widths: tuple[int, ...]) -> None:
    """A verify of W rows gives the bits of W decode steps, states included; the second request changes nothing."""
    params = make_params(heads, dim)
    slots = torch.tensor([2, 1])
    for width in widths:
        rows = make_rows(2 * width, heads, dim, BF16)
        pools = make_pools(1, 3, heads, dim, BF16)
        ring = make_store("replay", pools, width, ring=64, fill=0.0)
        own = type(ring)(*(t[0] for t in ring))
        lens = torch.tensor([5, 40])
        whole = kda_verify_replay(*rows, params, *pools.layer(0), slots, lens, width, own)
        for request in range(2):
            stepped, slot = pools.clone(), slots[request : request + 1]
            span = torch.arange(width) + request * width
            alone = make_store("replay", pools, width, ring=64, fill=0.0)
            alone = type(ring)(*(t[0] for t in alone))
            mine = kda_verify_replay(
                *rows.pick(span), params, *pools.layer(0), slot, lens[request : request + 1], width, alone
            )
            assert same_bits(mine, whole[span])
            for j in span.tolist():
                step = kda_decode(*rows.pick(torch.tensor([j])), params, *stepped.layer(0), slot)
                assert same_bits(step, whole[j : j + 1]), f"width {width}, row {j}"


def check_mla(heads: int, length: int, widths: tuple[int, ...]) -> None:
    """Row j of a verify window attends as a decode step at that length does, alone and beside another request."""
    last = max(widths)
    span, w_vc = length + last, _normal(heads, LATENT, 128, std=LATENT**-0.5)
    kv = _normal(2 * span + 1, LATENT + ROPE)
    table = torch.cat((torch.zeros(1, span, dtype=torch.int64), torch.arange(2 * span).view(2, span) + 1))
    q_lat, q_pe, gate = _normal(2 * last, heads, LATENT), _normal(2 * last, heads, ROPE), _normal(2 * last, heads)

    def attend(rows: Tensor, requests: list[int], lens: list[int], width: int) -> Tensor:
        ctx = PagedContext(table, torch.tensor(requests), torch.tensor(lens), width, span)
        return mla_decode_gated(q_lat[rows], q_pe[rows], kv, ctx, 0.07, w_vc, gate[rows])

    for width in widths:
        both = torch.cat((torch.arange(width), last + torch.arange(width)))
        together = attend(both, [1, 2], [length, length // 2], width)
        for place, row in enumerate(both.tolist()):
            request, base = (1, length) if place < width else (2, length // 2)
            alone = attend(torch.tensor([row]), [request], [base + place % width], 1)
            assert same_bits(together[place : place + 1], alone), f"width {width}, row {place}"
