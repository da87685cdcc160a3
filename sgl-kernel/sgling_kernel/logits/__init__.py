"""Arg-max over scores with the project's tie rule."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.linear import PackedWeight, linear_fp32
from sgling_kernel.logits import reference
from sgling_kernel.logits.reference import Draws, drawn_scores

__all__ = ["Draws", "argmax_lowest", "best_of_product", "best_token", "drawn_scores"]


def _why_not_kernel(scores: Tensor) -> str | None:
    """Reason why the Triton kernels cannot read these scores, or None."""
    return None if scores.stride(-1) == 1 else "the scores of a row are not side by side"


def argmax_lowest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Best score of each row and its column (lowest wins ties, NaN never); see reference.argmax_lowest."""
    if dispatch.use_triton(scores) and dispatch.usable("logits.kernel", _why_not_kernel(scores)):
        from sgling_kernel.logits import kernel

        return kernel.argmax_lowest(scores)
    return reference.argmax_lowest(scores)


def best_token(scores: Tensor, start: int, out: Tensor, ids: Tensor | None = None, draws: Draws | None = None) -> None:
    """Token id of the best score of each row, written where the next node reads it; see reference.best_token."""
    if dispatch.use_triton(scores) and dispatch.usable("logits.kernel", _why_not_kernel(scores)):
        from sgling_kernel.logits import kernel

        return kernel.best_token(scores, start, out, ids, draws)
    return reference.best_token(scores, start, out, ids, draws)


def best_of_product(
    hidden: Tensor, weight: Tensor | PackedWeight, start: int, out: Tensor, ids: Tensor | None = None
) -> None:
    """best_token of linear_fp32(hidden, weight), token for token; on a GPU the scores themselves are not written."""
    if dispatch.use_triton(hidden) and dispatch.is_decode_sized(len(hidden)) and not isinstance(weight, PackedWeight):
        from sgling_kernel.linear import cuda
        from sgling_kernel.logits import kernel

        if dispatch.usable("logits.product", cuda.why_not_best_parts(hidden, weight)):
            kernel.best_of_parts(cuda.best_parts(hidden, weight), None, out, start, ids)
            return
    best_token(linear_fp32(hidden, weight), start, out, ids)
