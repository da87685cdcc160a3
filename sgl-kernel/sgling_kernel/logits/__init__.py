"""Arg-max over scores with the project's tie rule."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.logits import reference

__all__ = ["argmax_lowest"]


def argmax_lowest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Best score of each row and its column (lowest wins ties, NaN never); see reference.argmax_lowest."""
    if dispatch.use_triton(scores) and scores.stride(-1) == 1:
        from sgling_kernel.logits import kernel

        return kernel.argmax_lowest(scores)
    return reference.argmax_lowest(scores)
