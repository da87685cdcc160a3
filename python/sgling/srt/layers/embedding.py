"""Token embedding with vocabulary rows sharded over ranks."""

from __future__ import annotations

import torch
from torch.nn import functional

from sgling.srt.layers.weights import WeightSource


class VocabParallelEmbedding:
    """Rows [start, start + size) of the table; a rank contributes zeros for ids it does not own."""

    def __init__(self, source: WeightSource, name: str, vocab_size: int):
        self.parallel = source.parallel
        self.start, self.size = self.parallel.shard(vocab_size)
        self.weight = source.shard(name, dim=0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [N] -> [N, H], the same bits on every rank."""
        if self.parallel.size == 1:
            return functional.embedding(ids, self.weight)
        local = ids - self.start
        owned = (local >= 0) & (local < self.size)
        rows = functional.embedding(torch.where(owned, local, 0), self.weight)
        return self.parallel.all_reduce(torch.where(owned[:, None], rows, 0))
