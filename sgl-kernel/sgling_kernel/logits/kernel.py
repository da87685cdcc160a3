"""Arg-max in Triton, in two nodes: the best of each block of columns, then the best block. Lowest id wins every tie."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _block_best_kernel(scores, best_score, best_id, stride, V: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(scores + row * stride + col, mask=col < V, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))  # NaN never wins
    score, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_score + row * PARTS + part, score)
    tl.store(best_id + row * PARTS + part, (part * BLOCK + index).to(tl.int64))


@triton.jit
def _best_block_kernel(part_score, part_id, best_score, best_id, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    value = tl.load(part_score + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    score, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_score + row, score)
    tl.store(best_id + row, tl.load(part_id + row * PARTS + index))


def argmax_lowest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """reference.argmax_lowest for scores [N, V] with unit column stride."""
    rows, vocab = scores.shape
    parts = triton.cdiv(vocab, BLOCK)
    part_score = torch.empty(rows, parts, dtype=torch.float32, device=scores.device)
    part_id = torch.empty(rows, parts, dtype=torch.int64, device=scores.device)
    best_score, best_id = part_score.new_empty(rows), part_id.new_empty(rows)
    _block_best_kernel[(rows, parts)](
        scores, part_score, part_id, scores.stride(0), V=vocab, PARTS=parts, BLOCK=BLOCK, num_warps=4
    )
    _best_block_kernel[(rows,)](
        part_score, part_id, best_score, best_id, PARTS=parts, BLOCK=triton.next_power_of_2(parts), num_warps=1
    )
    return best_score, best_id
