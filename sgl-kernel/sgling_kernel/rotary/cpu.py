"""Interleaved rotary embedding as one complex product, for serving on a CPU. Tested bit-equal to the reference."""

import torch
from torch import Tensor

_PAIRS_AT_ONCE = 16  # complex numbers per vector step; a remainder would run in a scalar loop, which rounds differently


def why_not_complex(x: Tensor) -> str | None:
    """Reason why the complex product would not give the reference's bits, or None if it does."""
    if x.device.type != "cpu":
        return f"vector loops are a property of the CPU, not of {x.device.type}"
    if x.shape[-1] % (2 * _PAIRS_AT_ONCE):
        return f"{x.shape[-1]} dimensions are no multiple of {2 * _PAIRS_AT_ONCE}"
    return None


def apply_rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """reference.apply_rope: (a + ib)(cos + i sin) holds the two real expressions there."""
    turn = torch.view_as_complex(table.index_select(0, positions)).view(x.shape[0], *(1,) * (x.dim() - 2), -1)
    pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
