"""The verdict of a chain in Triton, arg-max included, and where it goes (see reference.py and settlement.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.logits.kernel import block_best
from sgling_kernel.noise.kernel import position_key, unit_draw
from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

COPY_BLOCK = 1024


@triton.jit
def _accepted(candidates, target, request, stride_c, j, W):
    """Leading drafts that equal the target's choice; ``target`` holds the ids of rows j."""
    inside = j < W - 1
    draft = tl.load(candidates + request * stride_c + j + 1, mask=inside, other=0)
    return tl.min(tl.where(inside & (draft == target), W - 1, tl.minimum(j, W - 1)), 0)


@triton.jit(do_not_specialize=["stride_c", "stride_t", "W"])
def _accept_kernel(
    candidates, target_ids, accept_lens, bonus, stride_c, stride_t, W, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    request = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    target = tl.load(target_ids + request * stride_t + j, mask=j < W, other=0)
    correct = _accepted(candidates, target, request, stride_c, j, W)
    tl.store(accept_lens + request, (correct + 1).to(tl.int64))
    tl.store(bonus + request, tl.sum(tl.where(j == correct, target, 0), 0))


@triton.jit(do_not_specialize=["stride_c", "start", "W"])
def _greedy_kernel(
    part_score, part_id, candidates, rows, target_ids, accept_lens, bonus, stride_c, start, W,
    PARTS: tl.constexpr, BP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Best block of each row of a window, then the accepted prefix; nothing is accepted for request row 0."""
    request = tl.program_id(0).to(tl.int64)
    j, part = tl.arange(0, BLOCK), tl.arange(0, BP)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    at = (request * W + j) * PARTS
    mask = (j < W)[:, None] & (part < PARTS)[None, :]
    value = tl.load(part_score + at[:, None] + part[None, :], mask=mask, other=float("-inf"))
    _, index = tl.max(value, 1, return_indices=True, return_indices_tie_break_left=True)
    target = tl.load(part_id + at + index, mask=j < W, other=0) + start
    tl.store(target_ids + request * W + j, target, mask=j < W)
    correct = _accepted(candidates, target, request, stride_c, j, W)
    accepted = (correct + 1).to(tl.int64)
    if rows is not None:
        accepted = tl.where(tl.load(rows + request) > 0, accepted, 0)
    tl.store(accept_lens + request, accepted)
    tl.store(bonus + request, tl.sum(tl.where(j == correct, target, 0), 0))


@triton.jit(do_not_specialize=["W"])
def _settle_kernel(
    verdict, relayed, rows, seq_lens, ids_buffer, lens_buffer, seq_buffer, packed, source, copy, new_lens, new_bonus,
    strides, draw, W,
    SIMULATED: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, BF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (request, j) copies the features of row j; program (request, 0) also writes the verdict."""
    request, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, BLOCK)
    target_ids, accept_lens, bonus = verdict
    new_seq_lens, output_tokens = relayed
    stride_t, stride_b, stride_p, stride_f, stride_c = strides
    pdl_wait(PDL)
    pdl_trigger(PDL)
    if row == 0:
        target = tl.load(target_ids + request * stride_t + j, mask=j < W, other=0)
        accepted, last = tl.load(accept_lens + request), tl.load(bonus + request)
        seq = tl.load(seq_lens + request)
        if SIMULATED:
            low, share, key = draw
            wanted = low + tl.where(unit_draw(position_key(key, seq), 0) < share, 1, 0)
            accepted = tl.where(accepted > 0, tl.minimum(wanted, W), 0).to(tl.int64)
            last = tl.sum(tl.where(j == tl.maximum(accepted - 1, 0), target, 0), 0)
            tl.store(new_lens + request, accepted)
            tl.store(new_bonus + request, last)
        slot = tl.load(rows + request)
        tl.store(new_seq_lens + slot, seq + accepted)
        tl.store(output_tokens + slot, last)
        if ids_buffer is not None:
            tl.store(ids_buffer + request * stride_b + j, target, mask=j < W)
        if lens_buffer is not None:
            tl.store(lens_buffer + request, accepted)
        if seq_buffer is not None:
            tl.store(seq_buffer + request, seq)
        if packed is not None:
            tl.store(packed + request * stride_p + j, tl.where(j < W, target, accepted), mask=j <= W)
    if F > 0:
        at = request * W + row
        for first in range(0, F, BF):
            col = first + tl.arange(0, BF)
            value = tl.load(source + at * stride_f + col, mask=col < F)
            tl.store(copy + at * stride_c + col, value, mask=col < F)


def _block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def chain_accept(candidates: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """reference.chain_accept; rows may be strided."""
    bs, width = candidates.shape
    out = torch.empty(2, bs, dtype=torch.int64, device=candidates.device)
    _accept_kernel[(bs,)](
        candidates, target_ids, out[0], out[1], candidates.stride(0), target_ids.stride(0), width,
        BLOCK=_block(width), num_warps=1, **launch_pdl(candidates),
    )  # fmt: skip
    return out[0], out[1]


def verdict_greedy(logits: Tensor, candidates: Tensor, start: int, rows: Tensor | None) -> tuple[Tensor, ...]:
    """reference.verdict_greedy of a whole vocabulary in two nodes: (target ids, accept lengths, bonus)."""
    (bs, width), parts = candidates.shape, block_best(logits)
    ids = torch.empty(bs, width, dtype=torch.int64, device=logits.device)
    out = torch.empty(2, bs, dtype=torch.int64, device=logits.device)
    count = parts[0].shape[1]
    _greedy_kernel[(bs,)](
        *parts, candidates, rows, ids, out[0], out[1], candidates.stride(0), start, width, PARTS=count,
        BP=triton.next_power_of_2(count), BLOCK=_block(width), num_warps=4, **launch_pdl(logits),
    )  # fmt: skip
    return ids, out[0], out[1]


def settle(verdict, rows: Tensor, seq_lens: Tensor, sinks, simulated: tuple[float, int] | None):
    """settlement.settle in one node; simulated = (mean accept length, noise key); rows of the ids may be strided."""
    ids, lens, bonus = verdict
    (bs, width), fresh = ids.shape, (None, None)
    if simulated is not None:
        fresh = tuple(torch.empty(2, bs, dtype=torch.int64, device=ids.device))
    features = sinks.features or (None, None)
    strides = tuple(0 if t is None else t.stride(0) for t in (ids, sinks.target_ids, sinks.packed, *features))
    mean, key = simulated or (0.0, 0)
    size = 0 if features[0] is None else features[0].shape[1]
    _settle_kernel[(bs, width if size else 1)](
        (ids, lens, bonus), (sinks.new_seq_lens, sinks.output_tokens), rows, seq_lens, sinks.target_ids,
        sinks.accept_lens, sinks.seq_lens, sinks.packed, *features, *fresh, strides,
        (int(mean), mean - int(mean), key), width,
        SIMULATED=simulated is not None, F=size, BLOCK=_block(width + 1), BF=COPY_BLOCK, num_warps=4,
        **launch_pdl(rows),
    )  # fmt: skip
    return verdict if simulated is None else type(verdict)(ids, *fresh)
