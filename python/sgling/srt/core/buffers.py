"""Buffers of one decode step: written by one of its device steps, read by the next, addresses never change.

============== ==================== ========= ================ ===========================
buffer          dtype, shape         writer    readers          pad (rows behind the batch)
============== ==================== ========= ================ ===========================
draft_tokens   int64 [B, W-1]       draft     verify           any valid id
target_ids     int64 [B, W]         verify    extend (NEXTN)   any valid id
accept_lens    int64 [B]            verify    extend           0
features       dtype [B*W, F]       verify    extend           unused
============== ==================== ========= ================ ===========================

``features`` is what the drafter reads of verify's rows: final hidden states (NEXTN) or tapped layers side by side
(DSPARK). Lengths, slots and positions of the rows are :class:`sgling.srt.core.step_metadata.StepMetadata`. The host
never reads these buffers: it gets :class:`sgling.srt.core.step.StepOutput`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoundBuffers(NamedTuple):
    """Persistent tensors of a speculative round for at most B requests of width at most W."""

    draft_tokens: torch.Tensor
    target_ids: torch.Tensor
    accept_lens: torch.Tensor
    features: torch.Tensor

    @classmethod
    def allocate(cls, max_batch: int, width: int, feature_size: int, dtype: torch.dtype, device: str) -> RoundBuffers:
        """Zero-filled buffers."""

        def index_buffer(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        return cls(
            draft_tokens=index_buffer(max_batch, width - 1),
            target_ids=index_buffer(max_batch, width),
            accept_lens=index_buffer(max_batch),
            features=torch.zeros(max_batch * width, feature_size, dtype=dtype, device=device),
        )

    def views(self, batch: int, width: int) -> RoundBuffers:
        """The leading part of every buffer for ``batch`` requests of ``width`` rows (views)."""
        return RoundBuffers(
            draft_tokens=self.draft_tokens[:batch, : width - 1],
            target_ids=self.target_ids[:batch, :width],
            accept_lens=self.accept_lens[:batch],
            features=self.features[: batch * width],
        )
