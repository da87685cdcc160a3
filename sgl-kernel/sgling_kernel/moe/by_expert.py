"""The pairs of a prefill chunk in the order of their experts: a stable counting sort and the copy of rows, in Triton.

Three nodes: pairs per block and expert, the place of every pair, rows written to their places. Integers only, so the
places are those of a stable sort, however the pairs are cut into blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP, BLOCKS = 32, 128  # pairs that a program ranks at a time; programs at most
COUNT_TILE = 16  # blocks whose counts are read at a time
COLUMNS = 1024


@triton.jit(do_not_specialize=["pairs", "steps"])
def _count_pairs_kernel(ids, counts, pairs, steps, BE: tl.constexpr, STEP: tl.constexpr):
    block, expert = tl.program_id(0), tl.arange(0, BE)
    total = tl.zeros((BE,), dtype=tl.int32)
    for step in range(steps):
        pair = (block * steps + step) * STEP + tl.arange(0, STEP)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        total += tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + block * BE + expert, total)


@triton.jit(do_not_specialize=["pairs", "steps", "blocks"])
def _place_pairs_kernel(
    ids, counts, place, ends, pairs, steps, blocks,
    E: tl.constexpr, BE: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A pair's place: pairs of smaller experts, those of its expert in earlier blocks, those before it in its own."""
    block, expert = tl.program_id(0), tl.arange(0, BE)
    total, earlier = tl.zeros((BE,), dtype=tl.int32), tl.zeros((BE,), dtype=tl.int32)
    for first in range(0, blocks, TILE):
        other = first + tl.arange(0, TILE)
        count = tl.load(counts + other[:, None] * BE + expert[None, :], mask=(other < blocks)[:, None], other=0)
        total += tl.sum(count, 0)
        earlier += tl.sum(tl.where((other < block)[:, None], count, 0), 0)
    end = tl.cumsum(total, 0)
    if block == 0:
        tl.store(ends + expert, end, mask=expert < E)
    begin = end - total + earlier
    for step in range(steps):
        pair = (block * steps + step) * STEP + tl.arange(0, STEP)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        hit = (own[:, None] == expert[None, :]).to(tl.int32)
        at = tl.sum(hit * (begin[None, :] + tl.cumsum(hit, 0) - 1), 1)
        tl.store(place + pair, at.to(tl.int64), mask=pair < pairs)
        begin += tl.sum(hit, 0)


@triton.jit
def _spread_rows_kernel(x, place, out, stride_x, D: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * stride_x + d, mask=d < D, other=0.0)
    for slot in tl.static_range(TOP):
        tl.store(out + tl.load(place + row * TOP + slot) * D + d, value, mask=d < D)


def places(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Where each pair lies in a stable sort by expert.

    ids int64 [N, k], contiguous, each within [0, num_experts) -> (place int64 [N, k], ends int32 [num_experts], the
    number of pairs of experts up to and including each).
    """
    pairs = ids.numel()
    steps = triton.cdiv(pairs, STEP * BLOCKS)
    blocks, padded = triton.cdiv(pairs, STEP * steps), triton.next_power_of_2(num_experts)
    counts = torch.empty(blocks, padded, dtype=torch.int32, device=ids.device)
    place, ends = torch.empty_like(ids), torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    _count_pairs_kernel[(blocks,)](ids, counts, pairs, steps, BE=padded, STEP=STEP, num_warps=4)
    _place_pairs_kernel[(blocks,)](
        ids, counts, place, ends, pairs, steps, blocks,
        E=num_experts, BE=padded, STEP=STEP, TILE=COUNT_TILE, num_warps=4,
    )  # fmt: skip
    return place, ends


def spread_rows(x: Tensor, place: Tensor) -> Tensor:
    """Row n of x [N, d] (unit column stride) at each of the places of its pairs [N, k] -> [N * k, d]."""
    (rows, dim), top = x.shape, place.shape[1]
    out = torch.empty(rows * top, dim, dtype=x.dtype, device=x.device)
    block = min(COLUMNS, triton.next_power_of_2(dim))
    _spread_rows_kernel[(rows, triton.cdiv(dim, block))](
        x, place, out, x.stride(0), D=dim, TOP=top, BLOCK=block, num_warps=4
    )
    return out
