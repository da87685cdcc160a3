"""RMSNorm with plain weight; statistics in fp32, one rounding."""

from __future__ import annotations

import torch

from sgling.srt.layers.weights import WeightSource
from sgling_kernel.moe import ExpertOutputs, combine_add_rms_norm
from sgling_kernel.norm import fused_add_rms_norm, rms_norm


class RMSNorm:
    """x / rms(x) * weight, replicated on every rank."""

    def __init__(self, source: WeightSource, name: str, eps: float):
        self.weight = source.full(name)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> normalised, same dtype."""
        return rms_norm(x, self.weight, self.eps)

    def forward_add(self, x: torch.Tensor | ExpertOutputs, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual), both [N, D] in the model dtype; finishes an open sum over experts."""
        if isinstance(x, ExpertOutputs):
            return combine_add_rms_norm(x, residual, self.weight, self.eps)
        return fused_add_rms_norm(x, residual, self.weight, self.eps)
