"""Rotary embedding, plain torch: interleaved (GPT-J) or half-split (NeoX) pairs, fp32 table, one rounding."""

import torch
from torch import Tensor


def rope_table(max_positions: int, dim: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """Tabulate the rotation of every position, so that a forward only gathers.

    Returns fp32 [max_positions, dim/2, 2]: (cos, sin) of position * theta^(-2i/dim). The angle is an fp32 product, as
    in the engines that trained and serve the model; a table from fp64 angles differs beyond position 10^4.
    Raises ValueError for an odd or non-positive dim. Source: docs/ling3.md §3.2.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"rope dim must be a positive even number, got {dim}")
    pair = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
    inv_freq = 1.0 / theta ** (pair / dim)
    angle = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * inv_freq
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def apply_rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i+1) of the last dimension by its row's position.

    x [N, ..., dim] any float dtype (a middle head dimension shares the row's position), positions int64 [N],
    table fp32 [P, dim/2, 2]. (a, b) -> (a cos - b sin, b cos + a sin) in fp32, rounded once to x.dtype.
    Positions must lie below P: the table is indexed on the device and not checked here.
    """
    cos, sin = _rotation(x, positions, table)
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def apply_rope_neox(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """:func:`apply_rope` with half-split pairs (i, i + dim/2), the layout of Qwen-style drafters."""
    cos, sin = _rotation(x, positions, table)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _rotation(x: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of each row, broadcastable over the middle dimensions of x."""
    return table[positions].view(x.shape[0], *(1,) * (x.dim() - 2), *table.shape[1:]).unbind(-1)
