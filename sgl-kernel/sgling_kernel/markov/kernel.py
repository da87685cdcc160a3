"""The Markov chain of a block in Triton, one node per draft and one at the end (see reference.py).

Node k first reduces what node k - 1 left, the best token of every vocabulary block, to draft k: every program does so
for itself, which costs less than a node. Then each multiplies its rows of w2 with the draft's embedding, adds the base
logits and, for sampled requests, the noise of the target's draw, and leaves its own best token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.markov.reference import DraftNoise
from sgling_kernel.noise.kernel import gumbel, row_key, unit_draw
from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

TILE_VALUES = 1 << 15  # values of w2 that a program holds in registers
MAX_BATCH = 8


@triton.jit
def _best_of_parts(part_score, part_id, request, PARTS: tl.constexpr, BP: tl.constexpr):
    """Token of the best vocabulary block; blocks stand in id order, so the first of equals is the lowest id."""
    part = tl.arange(0, BP)
    at = request * PARTS + part
    score = tl.load(part_score + at, mask=part < PARTS, other=float("-inf"))
    _, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    return tl.load(part_id + request * PARTS + index)


@triton.jit(do_not_specialize=["k"])
def _markov_pick_kernel(
    base, factors, anchor, noise, inbox, outbox, out, strides, k,
    BS: tl.constexpr, SHAPE: tl.constexpr, BLOCKS: tl.constexpr, FIRST: tl.constexpr, SAMPLED: tl.constexpr,
    PARTS: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Node k of the chain; inbox and outbox hold (scores, tokens) of the vocabulary blocks of two drafts in a row."""
    V: tl.constexpr = SHAPE[0]
    R: tl.constexpr = SHAPE[1]
    BV: tl.constexpr = BLOCKS[0]
    BR: tl.constexpr = BLOCKS[1]
    w1, w2 = factors
    temperature, seed, rows, starts = noise
    part = tl.program_id(0)
    v, r = part * BV + tl.arange(0, BV), tl.arange(0, BR)
    mask = (v < V)[:, None] & (r < R)[None, :]
    weight = tl.load(w2 + v.to(tl.int64)[:, None] * R + r[None, :], mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    for request in range(BS):
        if FIRST:
            token = tl.load(anchor + request)
        else:
            token = _best_of_parts(inbox[0], inbox[1], request, PARTS, BP)
            if part == 0:
                tl.store(out + request * strides[2] + k - 1, token)
        embedded = tl.load(w1 + token * R + r, mask=r < R, other=0.0).to(tl.float32)
        logit = tl.sum(weight * embedded[None, :], 1)
        at = base + request * strides[0] + k * strides[1]
        logit += tl.load(at + v, mask=v < V, other=float("-inf"))
        if SAMPLED:
            row = tl.load(rows + request)
            heat = tl.load(temperature + row)
            drawn = gumbel(unit_draw(row_key(tl.load(seed + row), tl.load(starts + request) + k), v))
            logit = tl.where(heat > 0, logit / tl.where(heat > 0, heat, 1.0) + drawn, logit)
        logit = tl.where(logit == logit, logit, float("-inf"))  # NaN never wins
        score, index = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(outbox[0] + request * PARTS + part, score)
        tl.store(outbox[1] + request * PARTS + part, (part * BV + index).to(tl.int64))


@triton.jit(do_not_specialize=["k"])
def _markov_last_kernel(score_in, id_in, out, stride_out, k, PARTS: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    request = tl.program_id(0)
    tl.store(out + request * stride_out + k, _best_of_parts(score_in, id_in, request, PARTS, BP))


def markov_chain(base: Tensor, w1: Tensor, w2: Tensor, anchor: Tensor, noise: DraftNoise | None, out: Tensor) -> None:
    """reference.markov_chain for at most ``MAX_BATCH`` requests."""
    (bs, drafts, vocab), rank = base.shape, w2.shape[1]
    block_rank = max(16, triton.next_power_of_2(rank))
    block = max(16, TILE_VALUES // block_rank)
    parts = triton.cdiv(vocab, block)
    score = torch.empty(drafts, bs, parts, dtype=torch.float32, device=base.device)
    token = torch.empty(drafts, bs, parts, dtype=torch.int64, device=base.device)
    keys, sampled, pdl = noise or (anchor,) * 4, noise is not None, launch_pdl(base)
    sizes = {"PARTS": parts, "BP": triton.next_power_of_2(parts)}
    strides = (*base.stride()[:2], out.stride(0))
    for k in range(drafts):
        before = max(k - 1, 0)
        _markov_pick_kernel[(parts,)](
            base, (w1, w2), anchor, tuple(keys), (score[before], token[before]), (score[k], token[k]), out, strides, k,
            BS=bs, SHAPE=(vocab, rank), BLOCKS=(block, block_rank), FIRST=k == 0, SAMPLED=sampled, **sizes,
            num_warps=8, **pdl,
        )  # fmt: skip
    _markov_last_kernel[(bs,)](score[-1], token[-1], out, out.stride(0), drafts - 1, **sizes, num_warps=1, **pdl)


def why_not_chain(base: Tensor, w1: Tensor, w2: Tensor) -> str | None:
    """Reason why the kernel cannot take these operands, or None."""
    if base.shape[0] > MAX_BATCH:
        return f"{base.shape[0]} requests are more than {MAX_BATCH}: w2 is better read by matrix instructions"
    if base.stride(-1) != 1 or not (w1.is_contiguous() and w2.is_contiguous()):
        return "logits and factors must be contiguous"
    return None
