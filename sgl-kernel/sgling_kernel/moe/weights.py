"""The weights of a set of experts, or of one expert, as one value."""

from typing import NamedTuple

from torch import Tensor


class ExpertWeights(NamedTuple):
    """SwiGLU experts of one layer.

    Attributes:
        w13: [E, 2I, d] (one expert: [2I, d]), gate and up rows interleaved.
        w2: [E, d, I] (one expert: [d, I]).
        limit: clamp, None or 0 = none.
    """

    w13: Tensor
    w2: Tensor
    limit: float | None
