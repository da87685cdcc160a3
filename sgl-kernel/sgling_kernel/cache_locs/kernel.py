"""Positions and KV slots of a window in one Triton node (see reference.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["W"])
def _window_kernel(table, rows, starts, locs, positions, table_width, W, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    row = tl.load(rows + request)
    j = tl.arange(0, BLOCK)
    position = tl.where(row > 0, tl.load(starts + request), 0) + j
    slot = tl.load(table + row * table_width + position, mask=(j < W) & (row > 0), other=0)
    tl.store(locs + request * W + j, slot.to(tl.int64), mask=j < W)
    tl.store(positions + request * W + j, position, mask=j < W)


def window_locs(req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """reference.window_locs."""
    bs = req_pool_indices.shape[0]
    out = torch.empty(2, bs * width, dtype=torch.int64, device=starts.device)
    _window_kernel[(bs,)](
        req_to_token, req_pool_indices, starts, out[0], out[1], req_to_token.stride(0), width,
        BLOCK=max(16, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip
    return out[0], out[1]
