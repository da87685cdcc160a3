"""Pointwise functions whose bits do not depend on where an element lies in its buffer.

``torch.sigmoid`` and ``silu`` round differently in a CPU loop's vector body and in its scalar tail, so the same row
gives other bits in a batch of another size. ``torch.exp`` and the basic operations do not (measured, torch 2.13).
"""

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), any shape, x.dtype. Pass fp32: each step would round in a narrower type."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), any shape, x.dtype. Pass fp32, as for sigmoid."""
    return x / x.neg().exp_().add_(1)
