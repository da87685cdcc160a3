"""Linear layers without bias: replicated, column parallel (output rows sharded), row parallel (inputs sharded)."""

from __future__ import annotations

import torch

from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.layers.weights import WeightSource
from sgling_kernel.linear import linear, pack_weight


class FusedLinear:
    """Several projections of one input as one product; each output column is independent, so fusing changes no bit.

    Column-parallel and replicated weights may stand side by side: the caller hands over this rank's rows.
    """

    def __init__(self, weights: list[torch.Tensor]):
        self.weight = pack_weight(torch.cat(weights) if len(weights) > 1 else weights[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> [N, sum of local rows], model dtype."""
        return linear(x, self.weight)


class ReplicatedLinear:
    """A product every rank computes whole."""

    def __init__(self, source: WeightSource, name: str):
        self.weight = pack_weight(source.full(name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> [N, out], model dtype."""
        return linear(x, self.weight)


class RowParallelLinear:
    """A product whose input columns are sharded; partial sums are rounded to the model dtype, then reduced."""

    def __init__(self, source: WeightSource, name: str):
        self.weight = pack_weight(source.shard(name, dim=1))
        self.parallel: ParallelState = source.parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in / tp] -> [N, out], the same bits on every rank."""
        return self.parallel.all_reduce(linear(x, self.weight))
