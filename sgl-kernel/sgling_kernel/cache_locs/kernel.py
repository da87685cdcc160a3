"""Lengths, slots and positions of a step in one Triton node (see reference.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait


@triton.jit(do_not_specialize=["W"])
def _metadata_kernel(
    new_seq_lens, state_slot, table, rows, seq_lens, state_slots, locs, positions, table_width, W,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_trigger(PDL)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    real = row > 0
    length = tl.load(new_seq_lens + row, mask=real, other=0)
    tl.store(seq_lens + request, length)
    tl.store(state_slots + request, tl.load(state_slot + row, mask=real, other=0))
    j = tl.arange(0, BLOCK)
    position = length + j
    slot = tl.load(table + row * table_width + position, mask=(j < W) & real, other=0)
    tl.store(locs + request * W + j, slot.to(tl.int64), mask=j < W)
    tl.store(positions + request * W + j, position, mask=j < W)


def fill_step_metadata(
    new_seq_lens: Tensor,
    state_slot: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """reference.fill_step_metadata in one node."""
    width = out[2].shape[1]
    _metadata_kernel[(rows.shape[0],)](
        new_seq_lens, state_slot, req_to_token, rows, *out, req_to_token.stride(0), width,
        BLOCK=max(16, triton.next_power_of_2(width)), num_warps=1, **launch_pdl(rows),
    )  # fmt: skip


@triton.jit(do_not_specialize=["W"])
def _accepted_kernel(locs, accept_lens, out, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    pdl_trigger(PDL)
    request, j = tl.program_id(0), tl.arange(0, BLOCK)
    at = request * W + j
    kept = (j < W) & (j < tl.load(accept_lens + request))
    tl.store(out + at, tl.load(locs + at, mask=kept, other=0), mask=j < W)


def keep_accepted(locs: Tensor, accept_lens: Tensor) -> Tensor:
    """reference.keep_accepted."""
    out, bs = torch.empty_like(locs), accept_lens.shape[0]
    width = locs.shape[0] // bs
    _accepted_kernel[(bs,)](
        locs, accept_lens, out, width,
        BLOCK=max(16, triton.next_power_of_2(width)), num_warps=1, **launch_pdl(locs),
    )  # fmt: skip
    return out
