"""Index chains from request rows to cache slots, as pure functions of device lengths and tables.

Request row 0 is the dummy of padded rows: it always maps to slot 0, whatever its length buffer holds.
"""

from __future__ import annotations

import torch


def window_locs(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """KV slots and positions of ``width`` consecutive rows per request.

    Args:
        req_to_token: integer [R, Lmax], KV slot of each position of each request row.
        req_pool_indices: int64 [bs].
        starts: int64 [bs], position of each request's first row; ``starts + width <= Lmax`` (reserved beforehand).
        width: rows per request.

    Returns:
        (locs int64 [bs*width], positions int64 [bs*width]), request-major. Padded requests (row 0) get slot 0 and
        positions 0 .. width-1.
    """
    real = (req_pool_indices > 0).unsqueeze(-1)
    first = torch.where(real, starts.unsqueeze(-1), 0)
    positions = first + torch.arange(width, device=starts.device)
    locs = req_to_token[req_pool_indices.unsqueeze(-1), positions]
    return torch.where(real, locs.long(), 0).flatten(), positions.flatten()


def fill_step_metadata(
    new_seq_lens: torch.Tensor,
    state_slot: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Lengths, state slots and windows of a step, written into buffers whose addresses graphs know.

    Args:
        new_seq_lens, state_slot: int64 [R], committed length and recurrent-state slot of each request row.
        req_to_token: integer [R, Lmax].
        rows: int64 [bs]; row 0 is padding: length 0, state slot 0, slot 0 at positions 0 .. C - 1.
        out: (seq_lens [bs], state_slots [bs], locs [bs, C], positions [bs, C]), int64 and dense, written in place.
    """
    seq_lens, state_slots, locs, positions = out
    seq_lens.copy_(torch.where(rows > 0, new_seq_lens[rows], 0))
    state_slots.copy_(gather_state_slots(state_slot, rows))
    window = window_locs(req_to_token, rows, seq_lens, locs.shape[1])
    for buffer, value in zip((locs, positions), window, strict=True):
        buffer.copy_(value.view_as(buffer))


def keep_accepted(locs: torch.Tensor, accept_lens: torch.Tensor) -> torch.Tensor:
    """Slots of accepted rows: ``locs`` int64 [bs * W] with 0 for rows at or behind ``accept_lens`` int64 [bs]."""
    windows = locs.view(accept_lens.shape[0], -1)
    row = torch.arange(windows.shape[1], device=locs.device)
    return torch.where(row < accept_lens.unsqueeze(-1), windows, 0).flatten()


def context_locs(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, indptr: torch.Tensor, total: int
) -> torch.Tensor:
    """Cache slots of the leading positions of every request, one request after the other: int32 [total].

    ``indptr`` integer [bs + 1] on the device: request i contributes positions 0 .. indptr[i + 1] - indptr[i] - 1;
    ``total`` (host integer) is its last entry.
    """
    row = torch.arange(total, device=req_to_token.device)
    owner = torch.searchsorted(indptr[1:].long(), row, right=True)
    return req_to_token[req_pool_indices[owner], row - indptr[owner]].int()


def gather_state_slots(state_slot: torch.Tensor, req_pool_indices: torch.Tensor) -> torch.Tensor:
    """Recurrent-state slot of each request: ``state_slot`` int64 [R], rows [bs] -> int64 [bs]; padded rows get 0."""
    return torch.where(req_pool_indices > 0, state_slot[req_pool_indices], 0)
