"""A reduced output head for a drafter: only the rows of lm_head that belong to a list of frequent tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgling.srt.layers.logits import LogitsProcessor
from sgling_kernel.linear import PackedWeight, linear_fp32, pack_weight


class DraftHead:
    """Gathered copy of this rank's rows of the head; what is drafted changes no output id, only how often it is right.

    Attributes:
        ids: int64 [C], global token id of each column, ascending. A rank that owns none of the listed tokens proposes
            its first one.
    """

    def __init__(self, processor: LogitsProcessor, token_ids: Sequence[int]):
        start, size = processor.vocab_range
        weight = processor.weight.plain if isinstance(processor.weight, PackedWeight) else processor.weight
        own = [token for token in token_ids if start <= token < start + size] or [start]
        self.ids = torch.tensor(own, device=weight.device)
        self.weight = pack_weight(weight.index_select(0, self.ids - start))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] after the final norm -> fp32 [N, C]."""
        return linear_fp32(hidden, self.weight)
