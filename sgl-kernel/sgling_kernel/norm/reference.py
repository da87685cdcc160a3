"""RMS norms: fp32 inside, one rounding at the end (docs/ling3.md §3.0, §3.1 step 6)."""

import torch

from sgling_kernel.pointwise import sigmoid


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x · (mean(x²) + eps)^(-1/2) · weight over the last dim, x fp32 -> fp32."""
    mean_square = (x * x).sum(-1, keepdim=True).div_(x.shape[-1])  # same bits as mean(), which is slower to call
    return (x * mean_square.add_(eps).rsqrt_()).mul_(weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm with a plain weight (no 1 + w): x [..., D], weight [D] -> [..., D] in the dtype of x."""
    return _normalize(x.float(), weight, eps).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add and norm: x, residual [..., D] -> (normed, new residual), both in the dtype of x.

    The sum is formed in fp32; the norm sees it unrounded, the stored residual is rounded once.
    """
    total = x.float() + residual
    return _normalize(total, weight, eps).to(x.dtype), total.to(x.dtype)


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """KDA output norm, per head, with sigmoid gate: norm(o) · weight · σ(z), fp32 until the one rounding.

    o [N, H, V], z [N, H·V] or [N, H, V], weight [V] shared by the heads -> [N, H, V] in the dtype of o.
    """
    return _normalize(o.float(), weight, eps).mul_(sigmoid(z.float()).view(o.shape)).to(o.dtype)
