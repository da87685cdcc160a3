"""Optimizer of the embedded model: Muon for hidden matrices (batched by shape), AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NOT_HIDDEN = ("embedding", "head", "router_weight", "conv", "beta", "dt_bias", "a_log", "norm", "attention.gate")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a hidden weight matrix (or a stack of them), which Muon orthogonalises."""
    return parameter.ndim >= 2 and not any(part in name for part in NOT_HIDDEN)


def orthogonalize(gradient: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximate UV^T of matrices [n, r, c] by the quintic Newton-Schulz iteration (Muon's coefficients)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.bfloat16() if gradient.is_cuda else gradient.float()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return (x if wide else x.mT).float()


class PicoOptimizer:
    """Muon + AdamW over named parameters; ``step(factor)`` scales both base learning rates by ``factor``."""

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        muon_rate: float = 0.02,
        adam_rate: float = 3e-3,
        momentum: float = 0.95,
    ) -> None:
        self.muon_rate, self.adam_rate, self.momentum = muon_rate, adam_rate, momentum
        self.matrices = [parameter for name, parameter in named if is_hidden_matrix(name, parameter)]
        self.others = [parameter for name, parameter in named if not is_hidden_matrix(name, parameter)]
        self.buffers = [torch.zeros_like(parameter) for parameter in self.matrices]
        self.adam = torch.optim.AdamW(
            self.others, lr=adam_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=self.others[0].is_cuda
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update from the current gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.adam.step()
        by_shape: dict[torch.Size, list[int]] = {}
        for index, parameter in enumerate(self.matrices):
            by_shape.setdefault(parameter.shape[-2:], []).append(index)
        for shape, indices in by_shape.items():
            stacked = []
            for index in indices:
                gradient, buffer = self.matrices[index].grad, self.buffers[index]
                buffer.lerp_(gradient, 1 - self.momentum)
                stacked.append(gradient.lerp(buffer, self.momentum).reshape(-1, *shape))
            update = orthogonalize(torch.cat(stacked))
            rate = self.muon_rate * factor * max(1.0, shape[0] / shape[1]) ** 0.5
            parts = update.split([part.shape[0] for part in stacked])
            for index, part in zip(indices, parts, strict=True):
                self.matrices[index].add_(part.view_as(self.matrices[index]), alpha=-rate)

    def zero_grad(self) -> None:
        for parameter in (*self.matrices, *self.others):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"buffers": self.buffers, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for buffer, saved in zip(self.buffers, state["buffers"], strict=True):
            buffer.copy_(saved)
        self.adam.load_state_dict(state["adam"])
