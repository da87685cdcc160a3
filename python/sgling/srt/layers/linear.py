"""Linear layers without bias: replicated, column parallel (output rows sharded), row parallel (inputs sharded)."""

from __future__ import annotations

import torch

from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.layers.weights import WeightSource
from sgling_kernel.linear import gated_linear, linear, pack_weight

LOAD_BYTES = 16  # of the widest load of a kernel


class FusedLinear:
    """Several projections of one input as one product; each output column is independent, so fusing changes no bit.

    Column-parallel and replicated weights may stand side by side: the caller hands over this rank's rows. Output rows
    lie a multiple of ``LOAD_BYTES`` apart, whatever the sizes: kernels refuse parts of rows that begin elsewhere, and
    of a single row no one can tell, so plain decoding and verify would take different forms of an operator.
    """

    def __init__(self, weights: list[torch.Tensor]):
        self.rows = sum(map(len, weights))
        if padding := -self.rows % (LOAD_BYTES // weights[0].element_size()):
            weights = [*weights, weights[0].new_zeros(padding, weights[0].shape[1])]
        self.weight = pack_weight(torch.cat(weights) if len(weights) > 1 else weights[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, in] -> [N, sum of local rows], model dtype; a view where rows were padded."""
        return linear(x, self.weight)[:, : self.rows]


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

    def forward_gated(self, o: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """KDA's gated norm, then the product: o [N, H, V], z [N, H·V] -> [N, out], the same bits on every rank."""
        return self.parallel.all_reduce(gated_linear(o, z, norm_weight, eps, self.weight))
