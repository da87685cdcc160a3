"""Token embedding with vocabulary rows sharded over ranks."""

from __future__ import annotations

import torch
from torch.nn import functional

from sgling.srt.layers.norm import RMSNorm
from sgling.srt.layers.weights import WeightSource
from sgling_kernel.embedding import embed_norm, embed_pair


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

    def forward_norm(self, ids: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [N] -> (embedded rows, their norm), both [N, H]."""
        if self.parallel.size == 1:
            return embed_norm(ids, self.weight, (norm.weight, norm.eps))
        rows = self.forward(ids)
        return rows, norm.forward(rows)

    def forward_pair(
        self, ids: torch.Tensor, norm: RMSNorm, hidden: torch.Tensor, hidden_norm: RMSNorm
    ) -> torch.Tensor:
        """[norm of the embedding | norm of ``hidden``]: ids int64 [N], hidden [N, H] -> [N, 2 * H]."""
        if self.parallel.size == 1:
            norms = (norm.weight, norm.eps), (hidden_norm.weight, hidden_norm.eps)
            return embed_pair(ids, self.weight, norms[0], hidden, norms[1])
        return torch.cat((norm.forward(self.forward(ids)), hidden_norm.forward(hidden)), dim=-1)
