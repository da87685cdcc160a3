"""Samples packed into rows of fixed length, and the anchors drawn from them; pure functions of seeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch


class Sample(NamedTuple):
    """One conversation: ids int32 [n]; answer bool [n], True on supervised tokens; whether this target wrote them."""

    ids: np.ndarray
    answer: np.ndarray
    regenerated: bool
    temperature: float


class RowBatch(NamedTuple):
    """Rows of whole conversations, all [R, S]: tokens, documents, positions int64; answer bool.

    A row's rest is one document of padding; documents number the conversations of the batch.
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor


class Anchors(NamedTuple):
    """Blocks of a batch, all [R, A]: row index of the anchor, ascending, and whether the block counts."""

    index: torch.Tensor
    valid: torch.Tensor


def pack(samples: Iterable[Sample], count: int, length: int, pad: int) -> RowBatch:
    """Fill ``count`` rows of ``length`` tokens with whole conversations, in order.

    A conversation longer than a row is cut; one that does not fit any more begins the next row; the rest of the
    samples is left when all rows are full.
    """
    tokens = np.full((count, length), pad, dtype=np.int64)
    answer = np.zeros((count, length), dtype=bool)
    documents = np.zeros((count, length), dtype=np.int64)
    positions = np.zeros((count, length), dtype=np.int64)
    row = used = number = 0
    for sample in samples:
        size = min(len(sample.ids), length)
        if used + size > length:
            _close(documents, positions, (row, used), number)
            row, used, number = row + 1, 0, number + 1
        if row == count:
            break
        cut = slice(used, used + size)
        tokens[row, cut], answer[row, cut] = sample.ids[:size], sample.answer[:size]
        documents[row, cut], positions[row, cut] = number, np.arange(size)
        used, number = used + size, number + 1
    for rest in range(row, count):
        _close(documents, positions, (rest, used), number)
        used, number = 0, number + 1
    return RowBatch(*(torch.from_numpy(value) for value in (tokens, answer, documents, positions)))


def _close(documents: np.ndarray, positions: np.ndarray, place: tuple[int, int], number: int) -> None:
    """Make the rest of a row a document of its own."""
    row, used = place
    documents[row, used:] = number
    positions[row, used:] = np.arange(documents.shape[1] - used)


def can_anchor(rows: RowBatch) -> torch.Tensor:
    """bool [R, S]: supervised tokens that are followed by one of the same conversation and have a token before them."""
    following = rows.answer.roll(-1, 1) & (rows.documents.roll(-1, 1) == rows.documents)
    following[:, -1] = False
    return rows.answer & following & (rows.positions > 0)


def draw_anchors(rows: RowBatch, count: int, seed: int, step: int) -> Anchors:
    """Up to ``count`` anchors a row, uniform without replacement: a function of (seed, step)."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    possible = can_anchor(rows)
    luck = torch.rand(rows.tokens.shape, generator=generator).to(possible.device).masked_fill(~possible, -1.0)
    best = luck.topk(min(count, luck.shape[1]), dim=1)
    order = best.indices.sort(dim=1)
    return Anchors(order.values, best.values.gather(1, order.indices) >= 0)
