"""Drafts of a block, one after the other: each corrects the logits of the next (docs/dspark.md §1.4), plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sgling_kernel.linear.reference import linear_fp32
from sgling_kernel.logits.reference import argmax_lowest
from sgling_kernel.noise import gumbel_noise


class DraftNoise(NamedTuple):
    """Noise under which sampled requests draft: the noise the target will add when it draws the same token.

    Attributes:
        temperature: fp32 [R] by request row, 0 = greedy.
        seed: int64 [R].
        rows: int64 [bs], request rows.
        starts: int64 [bs], position of the target row that draws the first draft.
    """

    temperature: Tensor
    seed: Tensor
    rows: Tensor
    starts: Tensor

    def apply(self, logits: Tensor, k: int, vocab_start: int) -> Tensor:
        """Scores of draft k + 1 of every request from its logits fp32 [bs, V_local]."""
        temperature = self.temperature[self.rows].unsqueeze(-1)
        noise = gumbel_noise(self.seed[self.rows], self.starts + k, vocab_start, logits.shape[-1])
        return torch.where(temperature > 0, logits / torch.where(temperature > 0, temperature, 1.0) + noise, logits)


def markov_chain(base: Tensor, w1: Tensor, w2: Tensor, anchor: Tensor, noise: DraftNoise | None, out: Tensor) -> None:
    """Choose K drafts per request: draft k + 1 is the best of ``base[:, k] + w2 · w1[draft k]``; draft 0 is the anchor.

    Args:
        base: fp32 [bs, K, V], logits of the block rows.
        w1: [V, rank] and w2: [V, rank], one dtype.
        anchor: int64 [bs].
        noise: for sampled requests, None when all are greedy. The lowest id wins ties.
        out: int64 [bs, K], filled; rows may be strided.
    """
    previous = anchor
    for k in range(base.shape[1]):
        logits = base[:, k] + linear_fp32(functional.embedding(previous, w1), w2)
        previous = argmax_lowest(logits if noise is None else noise.apply(logits, k, 0))[1]
        out[:, k] = previous
