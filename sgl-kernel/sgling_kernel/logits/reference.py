"""Arg-max of score rows. The lowest id wins every tie and NaN never wins, on every device and rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling_kernel.noise import gumbel_noise


class Draws(NamedTuple):
    """Whose noise score rows get: request parameters, and the request and position of each row.

    Attributes:
        temperature, seed: fp32 and int64 [R]; temperature 0 = greedy.
        rows, positions: int64 [N], request row and position of the target row that draws the token.
        vocab_size: token ids of this vocabulary shard, for noise of a selection of them.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    vocab_size: int


def argmax_lowest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Best score of each row and its column: ``scores`` [N, V] -> (fp32 [N], int64 [N]).

    Columns are local: a vocabulary shard adds its first id before reducing. NaN counts as -inf; a row without any
    finite score gives column 0. ``torch.max`` returns the first maximal index by contract.
    """
    clean = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = clean.max(dim=-1)
    return best.values, best.indices


def drawn_scores(logits: torch.Tensor, draws: Draws, start: int, ids: torch.Tensor | None = None) -> torch.Tensor:
    """logits / T + Gumbel noise of rows that sample, logits of the others: fp32 [N, V].

    ``start``: first token id of the shard; ``ids`` int64 [V]: ascending token id of each column, None: the whole shard.
    """
    temperature = draws.temperature[draws.rows].unsqueeze(-1)
    noise = gumbel_noise(draws.seed[draws.rows], draws.positions, start, draws.vocab_size)
    noise = noise if ids is None else noise.index_select(1, ids - start)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0) + noise
    return torch.where(temperature > 0, scaled, logits)


def best_token(
    scores: torch.Tensor,
    start: int,
    out: torch.Tensor,
    ids: torch.Tensor | None = None,
    draws: Draws | None = None,
) -> None:
    """Write :func:`argmax_lowest`'s token ids into ``out`` int64 [N] (may be strided), in place.

    ``start``: token id of column 0; ``ids`` int64 [V] in its place: ascending token id of each column; ``draws``: noise
    of :func:`drawn_scores` first. For an unsharded vocabulary: nothing is reduced over ranks.
    """
    if draws is not None:
        scores = drawn_scores(scores, draws, start, ids)
    column = argmax_lowest(scores)[1]
    out.copy_(column + start if ids is None else ids[column])
