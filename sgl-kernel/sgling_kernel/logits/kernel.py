"""Arg-max in Triton, in two nodes: the best of each block of columns, then the best block. Lowest id wins every tie."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.noise.kernel import gumbel, row_key, unit_draw
from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

BLOCK = 2048


@triton.jit
def _noisy(value, draws, ids, row, col, start, V: tl.constexpr):
    """value / T + Gumbel noise where the row's request has a temperature T > 0."""
    temperatures, seeds, requests, positions = draws
    request = tl.load(requests + row)
    temperature = tl.load(temperatures + request)
    token = start + col if ids is None else tl.load(ids + col, mask=col < V, other=0).to(tl.int32)
    noise = gumbel(unit_draw(row_key(tl.load(seeds + request), tl.load(positions + row)), token))
    return tl.where(temperature > 0, value / tl.where(temperature > 0, temperature, 1.0) + noise, value)


@triton.jit
def _block_best_kernel(
    scores, draws, ids, best_score, best_id, stride, start,
    V: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = part * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    value = tl.load(scores + row * stride + col, mask=col < V, other=float("-inf")).to(tl.float32)
    if draws is not None:
        value = _noisy(value, draws, ids, row, col, start, V)
    value = tl.where(value == value, value, float("-inf"))  # NaN never wins
    score, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_score + row * PARTS + part, score)
    tl.store(best_id + row * PARTS + part, (part * BLOCK + index).to(tl.int64))


@triton.jit
def _best_block_kernel(
    part_score, part_id, best_score, best_id, ids, stride_id, start, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    value = tl.load(part_score + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    score, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    if best_score is not None:
        tl.store(best_score + row, score)
    column = tl.load(part_id + row * PARTS + index)
    token = column + start if ids is None else tl.load(ids + column)
    tl.store(best_id + row * stride_id, token)


def block_best(
    scores: Tensor, draws: tuple[Tensor, ...] | None = None, start: int = 0, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Best (score fp32, column int64) of each block of columns, both [N, parts]; scores [N, V], unit column stride.

    draws, start, ids: see reference.drawn_scores; without draws the scores are taken as they are.
    """
    rows, vocab = scores.shape
    parts = triton.cdiv(vocab, BLOCK)
    part_score = torch.empty(rows, parts, dtype=torch.float32, device=scores.device)
    part_id = torch.empty(rows, parts, dtype=torch.int64, device=scores.device)
    _block_best_kernel[(rows, parts)](
        scores, draws and tuple(draws[:4]), ids, part_score, part_id, scores.stride(0), start,
        V=vocab, PARTS=parts, BLOCK=BLOCK, num_warps=4, **launch_pdl(scores),
    )  # fmt: skip
    return part_score, part_id


def best_of_parts(
    parts: tuple[Tensor, Tensor], best_score: Tensor | None, best_id: Tensor, start: int, ids: Tensor | None
) -> None:
    """The second node: (scores, columns) [N, parts] of ascending blocks of columns -> best_score, best_id [N]."""
    count = parts[0].shape[1]
    _best_block_kernel[(best_id.shape[0],)](
        *parts, best_score, best_id, ids, best_id.stride(0), start,
        PARTS=count, BLOCK=triton.next_power_of_2(count), num_warps=1, **launch_pdl(best_id),
    )  # fmt: skip


def argmax_lowest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """reference.argmax_lowest for scores [N, V] with unit column stride."""
    parts = block_best(scores)
    best_score, best_id = parts[0].new_empty(scores.shape[0]), parts[1].new_empty(scores.shape[0])
    best_of_parts(parts, best_score, best_id, 0, None)
    return best_score, best_id


def best_token(
    scores: Tensor,
    start: int,
    out: Tensor,
    ids: Tensor | None = None,
    draws: tuple[Tensor, ...] | None = None,
) -> None:
    """reference.best_token for scores [N, V] with unit column stride; ``out`` may be strided."""
    best_of_parts(block_best(scores, draws, start, ids), None, out, start, ids)
