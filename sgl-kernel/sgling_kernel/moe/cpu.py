"""Routed experts for serving on a CPU: work proportional to the chosen pairs. Tested equal to the reference.

A pair is one (row, slot): row n, its j-th expert. No function here reads a device value on the host.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from sgling_kernel.linear import fixed_row_count
from sgling_kernel.moe.reference import swiglu

_ROWS_AT_ONCE = 16  # rows whose expert weights are gathered per pass
_STRIDE_BYTES = 16

# torch's own shape function of the grouped product accepts bf16 only; this one lets fp32 forwards run on fake tensors.
_library = torch.library.Library("sgling", "FRAGMENT")
_library.define("grouped_linear(Tensor x, Tensor w, Tensor ends) -> Tensor")


def _grouped_linear(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows of x [P, K] between ends[e-1] and ends[e] (int32 [E]) times w[e] [O, K] transposed -> [P, O]."""
    return F.grouped_mm(x, w.transpose(1, 2), offs=ends)


_library.impl("grouped_linear", _grouped_linear, "CPU")
_library.impl("grouped_linear", lambda x, w, ends: x.new_empty(x.shape[0], w.shape[1]), "Meta")


def why_not_grouped(x: Tensor, w13: Tensor, w2: Tensor) -> str | None:
    """Reason why the grouped product cannot serve these operands, or None if it can."""
    if x.device.type != "cpu":
        return f"the grouped expert product here is for the CPU, not for {x.device.type}"
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.shape[-1] * weight.element_size() % _STRIDE_BYTES:
            return f"a row of {name} ({weight.shape[-1]} values) is no multiple of {_STRIDE_BYTES} bytes"
    return None


def empty_experts(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Uninitialised weights of E experts, shape [E, out, in], in the memory order the device's decode path reads.

    On a CPU an expert's columns are contiguous (what `experts_by_bag` gathers), elsewhere its rows.
    """
    experts, rows, columns = shape
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(experts, columns, rows, dtype=dtype, device=device).transpose(1, 2)


def why_not_bags(x: Tensor, w13: Tensor, w2: Tensor) -> str | None:
    """Reason why weighted sums of weight columns cannot serve these operands, or None if they can."""
    if x.device.type != "cpu" or {x.dtype, w13.dtype, w2.dtype} != {torch.float32}:
        return f"columns are summed in fp32 on a CPU, not in {x.dtype} on {x.device.type}"
    if not (w13.transpose(1, 2).is_contiguous() and w2.transpose(1, 2).is_contiguous()):
        return "the columns of an expert are not contiguous (see empty_experts)"
    return None


def experts_by_bag(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float | None) -> Tensor:
    """reference.moe_experts with each product as a weighted sum of weight columns: no copy of a weight, no sorting.

    A bag is one row of one product, summed in column order, so its bits depend on no other row. The routing weight is
    applied before the down product, and the slots of a row are one sum.
    """
    (rows, top_k), (_, dim, width) = ids.shape, w2.shape
    pairs = ids.reshape(-1, 1)
    columns = torch.add(torch.arange(dim, device=x.device), pairs, alpha=dim)
    inputs = x.unsqueeze(1).expand(rows, top_k, dim).reshape(-1, dim)
    gu = _column_sums(w13, columns, inputs)
    hidden = swiglu(gu, limit).view(rows, top_k, width).mul_(weights.unsqueeze(-1)).view(rows, top_k * width)
    columns = torch.add(torch.arange(width, device=x.device), pairs, alpha=width).view(rows, top_k * width)
    return _column_sums(w2, columns, hidden)


def _column_sums(w: Tensor, columns: Tensor, factors: Tensor) -> Tensor:
    """Row b: the sum over j of factors[b, j] * column columns[b, j]; columns of w [E, O, K] count e * K + k -> [B, O].

    The operator itself and not its wrapper in torch.nn.functional, whose checks cost as much as the sums of one row.
    """
    starts = torch.arange(0, columns.numel(), columns.shape[1], device=w.device)
    table, flat = w.transpose(1, 2).flatten(0, 1), columns.view(-1)
    return torch.embedding_bag(table, flat, starts, False, 0, False, factors.reshape(-1))[0]


def experts_grouped(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float | None) -> Tensor:
    """reference.moe_experts with pairs sorted by expert: each chosen expert's weights are read once, others never."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(w13.shape[0], device=x.device), right=True, out_int32=True)
    gu = torch.ops.sgling.grouped_linear(x.index_select(0, order // ids.shape[1]), w13, ends)
    down = torch.ops.sgling.grouped_linear(swiglu(gu, limit).float(), w2.float(), ends)
    slots = torch.empty_like(down).index_copy_(0, order, down)
    return _combine(slots.view(*ids.shape, w2.shape[1]), weights).to(x.dtype)


def experts_by_row(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float | None) -> Tensor:
    """reference.moe_experts with every row's expert weights gathered: fastest for one row.

    A row is one element of a batched product, so in fixed-row mode its bits depend on no other row. Every pair costs a
    copy of its expert's weights.
    """
    top_k, (_, gu_dim, dim) = ids.shape[1], w13.shape
    slots = []
    for rows, experts in zip(x.split(_ROWS_AT_ONCE), ids.split(_ROWS_AT_ONCE), strict=True):
        num_rows, pairs = rows.shape[0], experts.flatten()
        stacked = w13.index_select(0, pairs).view(num_rows, top_k * gu_dim, dim)
        hidden = swiglu(_batched_product(stacked, rows).view(num_rows * top_k, gu_dim), limit)
        down = _batched_product(w2.index_select(0, pairs).float(), hidden.float())
        slots.append(down.view(num_rows, top_k, dim))
    return _combine(torch.cat(slots), weights).to(x.dtype)


def _batched_product(w: Tensor, x: Tensor) -> Tensor:
    """w [B, O, K] times x [B, K] -> [B, O].

    In fixed-row mode a zero second column rides along: torch computes one lone vector by a faster routine that gives
    other bits than its batched one.
    """
    columns = 1 if fixed_row_count() is None else 2
    return torch.bmm(w, F.pad(x[..., None], (0, columns - 1)))[..., 0]


def _combine(slots: Tensor, weights: Tensor) -> Tensor:
    """Weighted fp32 sum over slots [N, k, d], in slot order."""
    return (slots * weights[..., None]).sum(1)
