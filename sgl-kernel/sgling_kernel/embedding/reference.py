"""Embedding lookups fused with norms, plain torch: the specification. The table is whole (no vocabulary shard)."""

from __future__ import annotations

import torch
from torch.nn import functional

from sgling_kernel.norm.reference import rms_norm


def embed_norm(
    ids: torch.Tensor, table: torch.Tensor, norm: tuple[torch.Tensor, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stream and input of the first layer.

    ids int64 [N] (may be strided), table [V, D], norm = (weight [D], eps) -> (rows [N, D], rms_norm of them [N, D]).
    """
    rows = functional.embedding(ids, table)
    return rows, rms_norm(rows, *norm)


def embed_pair(
    ids: torch.Tensor,
    table: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    hidden: torch.Tensor,
    hidden_norm: tuple[torch.Tensor, float],
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Input of a NEXTN layer's ``eh_proj`` (docs/ling3.md §3.6): [norm(embedding) | norm(hidden)].

    ids int64 [N] (may be strided), table [V, D], norms as (weight [D], eps); hidden [N, D], or [R, D] from which
    ``rows`` int64 [N] picks -> [N, 2 * D].
    """
    if rows is not None:
        hidden = hidden.index_select(0, rows)
    return torch.cat((rms_norm(functional.embedding(ids, table), *norm), rms_norm(hidden, *hidden_norm)), dim=-1)
