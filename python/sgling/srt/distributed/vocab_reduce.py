"""Reductions over vocabulary shards (``ShardReduce`` of ``sgling_kernel.sampling``): logits are never gathered."""

from __future__ import annotations

import torch

from sgling.srt.distributed.parallel_state import ParallelState


class VocabShardReduce:
    """Combines per-shard results of [N] or [N, ...] rows; identical bits on every rank, one collective per call."""

    def __init__(self, parallel: ParallelState):
        self.parallel = parallel

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over shards, same shape and dtype."""
        return self.parallel.all_gather(x).amax(0)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over shards in rank order, same shape; fp32 sums stay fp32, int64 counts stay exact."""
        parts = self.parallel.all_gather(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def best(self, score: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest score over shards and its global token id; the lowest id wins a tie, a NaN score never wins.

        Args:
            score: fp32 [N], best of this shard.
            ids: int64 [N], its global token id.

        Both travel as one fp64 tensor: fp32 scores and token ids are exact in it.
        """
        packed = self.parallel.all_gather(torch.stack((score.double(), ids.double())))
        scores, candidates = packed[:, 0], packed[:, 1]
        scores = torch.where(scores.isnan(), -torch.inf, scores)
        top = scores.amax(0)
        winner = torch.where(scores == top, candidates, torch.inf).amin(0)
        return top.to(score.dtype), winner.to(ids.dtype)
