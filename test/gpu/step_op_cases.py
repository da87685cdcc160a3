"""Cases of the op tests: operators of the DSPARK drafter, and those at the ends of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu.op_case import CONTEXT, DIM, EPS, HEADS, HIDDEN, VOCAB, WIDTH, Case, case, normal
from sgling_kernel.block_attention import RowRotary, block_attention, prepare_heads
from sgling_kernel.cache_locs import fill_step_metadata, keep_accepted
from sgling_kernel.confidence import confidence_logits
from sgling_kernel.logits import argmax_lowest, best_token
from sgling_kernel.markov import markov_chain
from sgling_kernel.mla import PagedContext
from sgling_kernel.relay import gather_relay, scatter_relay, take_accepted, window_candidates
from sgling_kernel.rotary import rope_table
from sgling_kernel.verdict import Sinks, Verdict, chain_accept, settle

# ---- DSPARK drafter: one block over 8K tokens -----------------------------------------------------------------------


@case("block.prepare")
def _block_prepare(rows: int) -> Case:
    caches, norms = normal(1, CONTEXT + 1, 2 * WIDTH), (normal(DIM), normal(1, DIM), EPS)
    table, locs = rope_table(CONTEXT, DIM, 6e6, torch.get_default_device()), torch.arange(1, rows + 1) * 3
    positions = torch.arange(100, 100 + rows)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x = fresh["rows"].unsqueeze(1)
        rotary = RowRotary(positions[: len(x)], table, True)
        return (prepare_heads(x, norms, rotary, (caches, locs[: len(x)])),)

    return Case({"rows": normal(rows, 3 * WIDTH)}, run, (caches,))


@case("block.attend")
def _block_attend(rows: int) -> Case:
    keys, values = normal(CONTEXT + 1, 2, HEADS, DIM).unbind(1)
    table = torch.stack((torch.zeros(CONTEXT, dtype=torch.int64), torch.randperm(CONTEXT) + 1))
    one, seq_lens = torch.ones(1, dtype=torch.int64), torch.tensor([CONTEXT - rows - 5])
    context = PagedContext(table, one, seq_lens, rows, CONTEXT)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (block_attention(fresh["q"], keys, values, context, False, None, DIM**-0.5),)

    return Case({"q": normal(rows, HEADS, DIM)}, run, by_row=False)


@case("markov.chain")
def _markov(rows: int) -> Case:
    """Its CTAs wait for each other, so with few free SMs it ends when the others become free."""
    w1, w2, out = normal(VOCAB, 256), normal(VOCAB, 256, scale=0.1), torch.zeros(1, rows, dtype=torch.int64)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        markov_chain(fresh["base"], w1, w2, fresh["anchor"], None, out)
        return ()

    fresh = {"base": torch.randn(1, rows, VOCAB), "anchor": torch.tensor([17])}
    return Case(fresh, run, (out,), by_row=False)


@case("confidence")
def _confidence(rows: int) -> Case:
    w, bias, locs = torch.randn(1, HIDDEN + 256), torch.randn(1), torch.arange(1, rows + 1)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        logits = confidence_logits(fresh["hidden"], fresh["embedded"], w, bias)
        return logits, keep_accepted(locs, fresh["accept_lens"])

    fresh = {"hidden": normal(rows, HIDDEN), "embedded": normal(rows, 256), "accept_lens": torch.tensor([rows])}
    return Case(fresh, run, by_row=False)


# ---- ends of a step -------------------------------------------------------------------------------------------------


@case("argmax")
def _argmax(rows: int) -> Case:
    return Case({"scores": torch.randn(rows, VOCAB)}, lambda fresh: argmax_lowest(fresh["scores"]))


@case("best_token")
def _best_token(rows: int) -> Case:
    out = torch.zeros(rows, dtype=torch.int64)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        best_token(fresh["scores"], 0, out)
        return ()

    return Case({"scores": torch.randn(rows, VOCAB)}, run, (out,), by_row=False)


@case("verdict")
def _verdict(rows: int) -> Case:
    targets = torch.randint(1, 90, (1, rows))
    candidates = torch.cat((torch.tensor([[5]]), targets[:, :-1]), 1)
    buffers = tuple(torch.zeros(3, dtype=torch.int64) for _ in range(2))
    packed = torch.zeros(1, rows + 1, dtype=torch.int64)
    row, length = torch.ones(1, dtype=torch.int64), torch.tensor([61])

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        verdict = Verdict(fresh["targets"], *chain_accept(fresh["candidates"], fresh["targets"]))
        return tuple(settle(verdict, row, length, Sinks(*buffers, packed=packed)))

    return Case({"targets": targets, "candidates": candidates}, run, (*buffers, packed), by_row=False)


@case("metadata")
def _metadata(rows: int) -> Case:
    table, row = torch.randint(1, 90, (3, CONTEXT)), torch.ones(1, dtype=torch.int64)
    out = tuple(torch.zeros(*shape, dtype=torch.int64) for shape in ((1,), (1,), (1, rows), (1, rows)))

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        fill_step_metadata(fresh["lengths"], fresh["slots"], table, row, out)
        return tuple(buffer.clone() for buffer in out)

    return Case({"lengths": torch.tensor([0, 61, 7]), "slots": torch.tensor([0, 2, 1])}, run, out, by_row=False)


@case("relay")
def _relay(rows: int) -> Case:
    hidden, tokens, row = normal(3, HIDDEN), torch.randint(1, 90, (3,)), torch.ones(1, dtype=torch.int64)

    def run(fresh: dict[str, Tensor]) -> tuple[Tensor, ...]:
        (taken,) = take_accepted((fresh["features"],), fresh["accept_lens"], rows)
        scatter_relay((hidden, tokens), row, (taken, fresh["accept_lens"]))
        return (*gather_relay((hidden, tokens), row), window_candidates(tokens, row, fresh["drafts"]))

    drafts, features = torch.randint(1, 90, (1, rows)), normal(rows, HIDDEN)
    fresh = {"features": features, "accept_lens": torch.tensor([rows]), "drafts": drafts}
    return Case(fresh, run, (hidden, tokens), by_row=False)
