"""Relay buffers in Triton: several buffers per node, one program per row and block of columns (see reference.py)."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

BLOCK = 1024


@triton.jit
def _copy_rows_kernel(
    sources, targets, source_strides, target_strides, source_rows, target_rows, accept_lens, W,
    DIMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, b) copies columns of block b of row i of every source; an index that is None is the identity."""
    i = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    source_row, target_row = i, i
    if source_rows is not None:
        source_row = tl.load(source_rows + i)
    if target_rows is not None:
        target_row = tl.load(target_rows + i)
    if accept_lens is not None:
        source_row = i * W + tl.maximum(tl.load(accept_lens + i) - 1, 0)
    for k in tl.static_range(len(DIMS)):
        mask = col < DIMS[k]
        value = tl.load(sources[k] + source_row * source_strides[k] + col, mask=mask)
        tl.store(targets[k] + target_row * target_strides[k] + col, value.to(targets[k].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["W"])
def _candidates_kernel(output_tokens, rows, drafts, out, stride, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    root = tl.load(output_tokens + tl.load(rows + request))
    draft = tl.load(drafts + request * stride + j - 1, mask=(j > 0) & (j < W), other=0)
    tl.store(out + request * W + j, tl.where(j == 0, root, draft), mask=j < W)


def _copy_rows(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    indices: tuple[Tensor | None, Tensor | None, Tensor | None],
    count: int,
    width: int,
) -> None:
    """Rows of dense [*, ...] tensors; indices = (source rows, target rows, accept lengths)."""
    dims = tuple(target[0].numel() for target in targets)
    _copy_rows_kernel[(count, triton.cdiv(max(dims), BLOCK))](
        tuple(sources), tuple(targets), tuple(s.stride(0) for s in sources), tuple(t.stride(0) for t in targets),
        *indices, width, DIMS=dims, BLOCK=min(BLOCK, triton.next_power_of_2(max(dims))), num_warps=4,
        **launch_pdl(targets[0]),
    )  # fmt: skip


def gather_relay(buffers: Sequence[Tensor], rows: Tensor, out: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """reference.gather_relay in one node; rows of ``out`` may be strided."""
    out = out or tuple(buffer.new_empty(rows.shape[0], *buffer.shape[1:]) for buffer in buffers)
    _copy_rows(buffers, out, (rows, None, None), rows.shape[0], 1)
    return tuple(out)


def scatter_relay(buffers: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor]) -> None:
    """reference.scatter_relay in one node."""
    _copy_rows(values, buffers, (None, rows, None), rows.shape[0], 1)


def take_accepted(sources: Sequence[Tensor], accept_lens: Tensor, width: int) -> tuple[Tensor, ...]:
    """reference.take_accepted in one node; rows may be strided, the rest of each source is dense."""
    count = accept_lens.shape[0]
    out = tuple(source.new_empty(count, *source.shape[1:]) for source in sources)
    _copy_rows(sources, out, (None, None, accept_lens), count, width)
    return out


def window_candidates(output_tokens: Tensor, rows: Tensor, drafts: Tensor) -> Tensor:
    """reference.window_candidates in one node; rows of ``drafts`` may be strided."""
    bs, width = rows.shape[0], drafts.shape[1] + 1
    out = torch.empty(bs, width, dtype=torch.int64, device=rows.device)
    _candidates_kernel[(bs,)](
        output_tokens, rows, drafts, out, drafts.stride(0), width,
        BLOCK=max(16, triton.next_power_of_2(width)), num_warps=1, **launch_pdl(rows),
    )  # fmt: skip
    return out
