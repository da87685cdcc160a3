"""Matrix products on a CPU with large weights also kept in the library's blocked layout. Tested equal to the reference.

torch's fp32 product takes a plain weight to MKL, which costs almost twice as much for two rows as for one and reaches
half of what oneDNN reaches with a blocked weight on many rows (docs/decisions/0006-cpu-operators.md has the numbers).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sgling_kernel.linear.fixed_rows import fixed_row_count, in_row_blocks

_PACK_ABOVE = 1 << 16  # weights up to this many elements gain nothing: the library's call costs more than the product
_ALWAYS_BLOCKED_FROM = 1 << 20  # from here on the blocked layout also wins for a single row
_TYPICAL_ROWS = 8  # row count the blocks are laid out for; other counts use the same layout


class PackedWeight(NamedTuple):
    """One weight in two layouts.

    Attributes:
        plain: fp32 [O, K], row-major.
        blocked: the same values in oneDNN's layout (opaque).
    """

    plain: Tensor
    blocked: Tensor


def why_not_packed(w: Tensor) -> str | None:
    """Reason why a weight is better left as it is, or None if a second, blocked copy pays."""
    if type(w) is not Tensor:
        return f"a {type(w).__name__} has no storage to reorder"
    if w.device.type != "cpu" or w.dtype is not torch.float32:
        return f"blocked weights are for fp32 on a CPU, not for {w.dtype} on {w.device.type}"
    if w.numel() <= _PACK_ABOVE:
        return f"{w.numel()} elements are too few"
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    return None


def pack_weight(w: Tensor) -> Tensor | PackedWeight:
    """Prepare a weight [O, K] for :func:`linear`, once at load; weights that would not gain come back unchanged."""
    if why_not_packed(w) is not None:
        return w
    return PackedWeight(w, torch.ops.mkldnn._reorder_linear_weight(w, _TYPICAL_ROWS))


def packed_linear(x: Tensor, w: PackedWeight) -> Tensor:
    """x fp32 [N, K] times w [O, K] transposed -> fp32 [N, O]; in fixed-row mode a row's bits do not depend on N."""
    if fixed_row_count() is not None:
        return in_row_blocks(lambda rows: _product(rows, w), x)
    return _product(x, w)


def _product(x: Tensor, w: PackedWeight) -> Tensor:
    if x.shape[0] == 1 and w.plain.numel() < _ALWAYS_BLOCKED_FROM:
        return F.linear(x, w.plain)
    return torch.ops.mkldnn._linear_pointwise(x, w.blocked, None, "none", [], "")
