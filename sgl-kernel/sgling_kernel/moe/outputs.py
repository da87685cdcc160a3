"""The output of an MoE layer before its last step, so that the next norm can take that step over."""

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertOutputs(NamedTuple):
    """What the down products of one layer wrote, neither weighed nor summed.

    Attributes:
        values: fp32 [N, k, d], or [N, k + 1, d] with the shared expert in the last slot.
        weights: fp32 [N, k], routing weights.
        dtype: model dtype, in which the layer's output is rounded.
    """

    values: Tensor
    weights: Tensor
    dtype: torch.dtype

    @property
    def has_shared(self) -> bool:
        """Whether the last slot is the shared expert."""
        return self.values.shape[1] > self.weights.shape[1]
