"""Rotary position embedding shared by all MLA layers of a model."""

from __future__ import annotations

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling_kernel.rotary import apply_rope, rope_table

WINDOW_MARGIN = 64  # a verify window may start at the last position of the context and reach beyond it


class RotaryEmbedding:
    """Interleaved-pair RoPE over all ``qk_rope_head_dim`` dimensions; the fp32 cos/sin table is held once per model."""

    def __init__(self, config: ModelConfig, device: str):
        self.table = rope_table(
            config.max_position_embeddings + WINDOW_MARGIN, config.qk_rope_head_dim, config.rope_theta, device
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [N, ..., rope] rotated to positions int64 [N], same dtype."""
        return apply_rope(x, positions, self.table)
