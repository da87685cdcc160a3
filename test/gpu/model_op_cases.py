"""Cases of the op tests: operators of the target and the NEXTN layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu.op_case import (
    CONTEXT,
    DEPTH,
    DIM,
    EPS,
    EXPERT_WIDTH,
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    LATENT,
    LAYERS,
    RING,
    ROPE,
    TOP_K,
    VOCAB,
    WIDTH,
    Case,
    case,
    normal,
    weight,
)
from sgling_kernel.embedding import embed_norm, embed_pair
from sgling_kernel.kda import (
    KDAParams,
    ReplayRing,
    StagedBuffers,
    commit_replay,
    commit_staged,
    kda_decode,
    kda_verify_replay,
    kda_verify_staged,
)
from sgling_kernel.linear import gated_linear, linear, linear_fp32
from sgling_kernel.logits import best_of_product
from sgling_kernel.mla import PagedContext, mla_decode_gated, prepare_absorbed
from sgling_kernel.moe import ExpertWeights, combine, combine_add_rms_norm, dense_ffn, experts_with_shared
from sgling_kernel.moe import cuda as moe_cuda
from sgling_kernel.norm import fused_add_rms_norm, rms_norm
from sgling_kernel.rotary import rope_table
from sgling_kernel.router import RouterConfig, add_rms_norm_router, grouped_topk

# ---- dense ----------------------------------------------------------------------------------------------------------


def product(name: str, outputs: int, inputs: int, op: Callable = linear) -> None:
    """A dense product with a weight [outputs, inputs]."""

    @case(name)
    def make(rows: int) -> Case:
        w = weight(outputs, inputs)
        return Case({"x": normal(rows, inputs)}, lambda fresh: (op(fresh["x"], w),))


product("kda.in_proj", 5 * WIDTH + HEADS, HIDDEN)
product("mla.in_proj", HEADS * DIM + (HEADS + 1) * ROPE + LATENT + HEADS, HIDDEN)
product("mla.dense", HIDDEN, WIDTH)
product("eh_proj", HIDDEN, 2 * HIDDEN)
product("router", EXPERTS, HIDDEN, linear_fp32)
product("lm_head", VOCAB, HIDDEN, linear_fp32)


@case("lm_head, best only")
def _best(rows: int) -> Case:
    w = weight(VOCAB, HIDDEN)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        out = torch.empty(rows, dtype=torch.int64, device=w.device)
        best_of_product(fresh["x"], w, 0, out)
        return (out,)

    return Case({"x": normal(rows, HIDDEN)}, run)


@case("kda.o_proj")
def _gated(rows: int) -> Case:
    w, norm = weight(HIDDEN, WIDTH), normal(DIM)
    fresh = {"o": normal(rows, HEADS, DIM), "z": normal(rows, WIDTH)}
    return Case(fresh, lambda fresh: (gated_linear(fresh["o"], fresh["z"], norm, EPS, w),))


@case("ffn")
def _ffn(rows: int) -> Case:
    w13, w2 = weight(2 * FFN, HIDDEN), weight(HIDDEN, FFN)
    return Case({"x": normal(rows, HIDDEN)}, lambda fresh: (dense_ffn(fresh["x"], w13, w2, None),))


@case("norm+router")
def _norm_router(rows: int) -> Case:
    """Behind a projection, as in a layer: the residual is older than the node before."""
    projection, norm, w = weight(HIDDEN, WIDTH), normal(HIDDEN), weight(EXPERTS, HIDDEN)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return add_rms_norm_router(linear(fresh["attended"], projection), fresh["residual"], norm, EPS, w)

    return Case({"attended": normal(rows, WIDTH), "residual": normal(rows, HIDDEN)}, run)


# ---- experts --------------------------------------------------------------------------------------------------------


@case("topk")
def _topk(rows: int) -> Case:
    bias, config = torch.randn(EXPERTS) * 0.01, RouterConfig(8, 4, TOP_K, True, 2.5)
    return Case({"logits": torch.randn(rows, EXPERTS)}, lambda fresh: grouped_topk(fresh["logits"], bias, config))


def expert_operands(rows: int) -> tuple[ExpertWeights, ExpertWeights, dict[str, Tensor]]:
    """A quarter of the experts, the shared one, and rows with their routing."""
    count = EXPERTS // 4
    w13 = normal(count, 2 * EXPERT_WIDTH, HIDDEN, scale=HIDDEN**-0.5)
    w2 = normal(count, HIDDEN, EXPERT_WIDTH, scale=EXPERT_WIDTH**-0.5)
    shared = ExpertWeights(weight(2 * EXPERT_WIDTH, HIDDEN), weight(HIDDEN, EXPERT_WIDTH), 7.0)
    ids = torch.stack([torch.randperm(count)[:TOP_K] for _ in range(rows)])
    fresh = {"x": normal(rows, HIDDEN), "weights": torch.rand(rows, TOP_K), "ids": ids}
    return ExpertWeights(w13, w2, 7.0), shared, fresh


@case("experts")
def _experts(rows: int) -> Case:
    experts, shared, fresh = expert_operands(rows)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (combine(experts_with_shared(fresh["x"], experts, shared, fresh["weights"], fresh["ids"])),)

    return Case(fresh, run)


@case("experts, walking")
def _experts_walking(rows: int) -> Case:
    experts, shared, fresh = expert_operands(rows)
    ctas = torch.cuda.get_device_properties(0).multi_processor_count

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        hidden = moe_cuda.up(fresh["x"], experts, shared, fresh["ids"], ctas)
        return (moe_cuda.down(hidden, experts, shared, fresh["ids"], ctas),)

    return Case(fresh, run)


@case("experts+norm")
def _experts_norm(rows: int) -> Case:
    experts, shared, fresh = expert_operands(rows)
    norm = normal(HIDDEN)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        outputs = experts_with_shared(fresh["x"], experts, shared, fresh["weights"], fresh["ids"])
        finish = fused_add_rms_norm if isinstance(outputs, Tensor) else combine_add_rms_norm
        return finish(outputs, fresh["residual"], norm, EPS)

    return Case({**fresh, "residual": normal(rows, HIDDEN)}, run)


# ---- norms and embedding --------------------------------------------------------------------------------------------


@case("rms_norm")
def _norm(rows: int) -> Case:
    w = normal(HIDDEN)
    return Case({"x": normal(rows, HIDDEN)}, lambda fresh: (rms_norm(fresh["x"], w, EPS),))


@case("add_rms_norm")
def _add_norm(rows: int) -> Case:
    w = normal(HIDDEN)
    fresh = {"x": normal(rows, HIDDEN), "residual": normal(rows, HIDDEN)}
    return Case(fresh, lambda fresh: fused_add_rms_norm(fresh["x"], fresh["residual"], w, EPS))


@case("embed_norm")
def _embed(rows: int) -> Case:
    table, w = normal(VOCAB, HIDDEN), normal(HIDDEN)
    fresh = {"ids": torch.randint(1, VOCAB, (rows,))}
    return Case(fresh, lambda fresh: embed_norm(fresh["ids"], table, (w, EPS)))


@case("embed_pair")
def _embed_pair(rows: int) -> Case:
    table, w, v = normal(VOCAB, HIDDEN), normal(HIDDEN), normal(HIDDEN)
    fresh = {"ids": torch.randint(1, VOCAB, (rows,)), "hidden": normal(rows, HIDDEN)}
    return Case(fresh, lambda fresh: (embed_pair(fresh["ids"], table, (w, EPS), fresh["hidden"], (v, EPS)),))


# ---- KDA: one request in slot 1 -------------------------------------------------------------------------------------


def kda_params() -> KDAParams:
    return KDAParams(torch.randn(3 * WIDTH, 4) * 0.5, torch.randn(HEADS) * 0.3, torch.randn(HEADS, DIM), -5.0)


def kda_rows(fresh: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, f and b as slices of the input projection."""
    qkv, b, f, _ = fresh["rows"].split((3 * WIDTH, HEADS, WIDTH, WIDTH), -1)
    return qkv, f, b


def kda_pools(*lead: int) -> tuple[Tensor, Tensor]:
    return normal(*lead, 2, 3, 3 * WIDTH), torch.randn(*lead, 2, HEADS, DIM, DIM) * 0.05


def kda_ring(*lead: int) -> ReplayRing:
    """A full ring, as verifies leave it."""
    k, v = (normal(*lead, 2, RING, HEADS, DIM) for _ in range(2))
    g, beta = -torch.rand(*lead, 2, RING, HEADS, DIM), torch.rand(*lead, 2, RING, HEADS)
    return ReplayRing(normal(*lead, 2, RING, 3 * WIDTH), k, v, g, beta)


def kda_stage(*lead: int) -> StagedBuffers:
    state = torch.randn(*lead, 2, DEPTH, HEADS, DIM, DIM)
    return StagedBuffers(normal(*lead, 2, DEPTH, 3, 3 * WIDTH), state)


@case("kda.decode")
def _kda_decode(rows: int) -> Case:
    p, pools = kda_params(), kda_pools()
    slots = torch.ones(1, dtype=torch.int64)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (kda_decode(*(t[:1] for t in kda_rows(fresh)), p, *pools, slots),)

    return Case({"rows": normal(rows, 5 * WIDTH + HEADS)}, run, pools, by_row=False)


@case("kda.verify_replay")
def _kda_replay(rows: int) -> Case:
    p, pools, ring = kda_params(), kda_pools(), kda_ring()
    slots = torch.ones(1, dtype=torch.int64)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (kda_verify_replay(*kda_rows(fresh), p, *pools, slots, fresh["seq_lens"], rows, ring),)

    fresh = {"rows": normal(rows, 5 * WIDTH + HEADS), "seq_lens": torch.tensor([61])}
    return Case(fresh, run, tuple(ring), by_row=False)


@case("kda.verify_staged")
def _kda_staged(rows: int) -> Case:
    p, pools, stage = kda_params(), kda_pools(), kda_stage()
    slots = torch.ones(1, dtype=torch.int64)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (kda_verify_staged(*kda_rows(fresh), p, *pools, slots, rows, stage),)

    return Case({"rows": normal(rows, 5 * WIDTH + HEADS)}, run, tuple(stage), by_row=False)


@case("kda.commit_replay")
def _kda_fold(rows: int) -> Case:
    pools, ring, slots = kda_pools(LAYERS), kda_ring(LAYERS), torch.ones(1, dtype=torch.int64)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        commit_replay(*pools, ReplayRing(**{**ring._asdict(), "k": fresh["k"]}), slots, *_lengths(fresh), DEPTH)
        return ()

    fresh = {"accept_lens": torch.tensor([rows]), "seq_lens": torch.tensor([61]), "k": ring.k}
    return Case(fresh, run, pools, by_row=False)


def _lengths(fresh: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return fresh["seq_lens"], fresh["accept_lens"]


@case("kda.commit_staged")
def _kda_snapshot(rows: int) -> Case:
    pools, stage, slots = kda_pools(LAYERS), kda_stage(LAYERS), torch.ones(1, dtype=torch.int64)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        commit_staged(*pools, stage, slots, fresh["accept_lens"])
        return ()

    return Case({"accept_lens": torch.tensor([rows])}, run, pools, by_row=False)


# ---- MLA: one request of 8K tokens ----------------------------------------------------------------------------------


@case("mla.prepare")
def _mla_prepare(rows: int) -> Case:
    w_kc, norm = normal(HEADS, DIM, LATENT, scale=DIM**-0.5), (normal(LATENT), EPS)
    rotary = (torch.arange(100, 100 + rows), rope_table(CONTEXT, ROPE, 6e6, torch.get_default_device()))
    pool, locs = normal(CONTEXT + 1, LATENT + ROPE), torch.arange(1, rows + 1) * 3
    sizes = (HEADS * DIM, (HEADS + 1) * ROPE, LATENT, HEADS)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        first, pe, latent, _ = fresh["rows"].split(sizes, -1)
        n = len(first)
        q_nope, pe = first.unflatten(-1, (HEADS, DIM)), pe.unflatten(-1, (-1, ROPE))
        return prepare_absorbed(q_nope, w_kc, pe, latent, norm, (rotary[0][:n], rotary[1]), (pool, locs[:n]))

    return Case({"rows": normal(rows, sum(sizes))}, run, (pool,))


@case("mla.attend")
def _mla_attend(rows: int) -> Case:
    w_vc, pool = normal(HEADS, LATENT, DIM, scale=LATENT**-0.5), normal(CONTEXT + 1, LATENT + ROPE)
    table = torch.stack((torch.zeros(CONTEXT, dtype=torch.int64), torch.randperm(CONTEXT) + 1))
    one, seq_lens = torch.ones(1, dtype=torch.int64), torch.tensor([CONTEXT - rows - 5])
    context = PagedContext(table, one, seq_lens, rows, CONTEXT, early=True)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        queries = (fresh["q_lat"], fresh["q_pe"])
        return (mla_decode_gated(*queries, pool, context, (DIM + ROPE) ** -0.5, w_vc, fresh["gate"]),)

    fresh = {"q_lat": normal(rows, HEADS, LATENT), "q_pe": normal(rows, HEADS, ROPE), "gate": normal(rows, HEADS)}
    return Case(fresh, run, by_row=False)
