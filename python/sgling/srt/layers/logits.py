"""Output head: fp32 logits of this rank's part of the vocabulary."""

from __future__ import annotations

import torch

from sgling.srt.distributed.parallel_state import ParallelState
from sgling_kernel.linear import linear_fp32, pack_weight


class LogitsProcessor:
    """lm_head rows [start, start + size); ``vocab_range`` is that pair. Logits are fp32 and never gathered here."""

    def __init__(self, weight: torch.Tensor, parallel: ParallelState, vocab_size: int):
        self.weight = pack_weight(weight)
        self.vocab_range = parallel.shard(vocab_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] after the final norm -> fp32 [N, size], accumulated in fp32 and never rounded to bf16."""
        return linear_fp32(hidden, self.weight)
