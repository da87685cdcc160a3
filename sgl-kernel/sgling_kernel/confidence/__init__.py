"""From confidence logits of drafts to the number of rows each request's verify gets."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.confidence import reference
from sgling_kernel.confidence.reference import allocate_rows, survival

__all__ = ["allocate_rows", "confidence_logits", "survival"]


def confidence_logits(hidden: Tensor, embedded: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """Raw logits of the confidence head; see reference.confidence_logits."""
    reason = None if hidden.stride(1) == 1 else "the values of a row are not side by side"
    if dispatch.use_triton(hidden) and dispatch.usable("confidence.kernel", reason):
        from sgling_kernel.confidence import kernel

        return kernel.confidence_logits(hidden, embedded, weight, bias)
    return reference.confidence_logits(hidden, embedded, weight, bias)
