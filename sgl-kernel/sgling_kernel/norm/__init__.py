"""RMS norms of the trunk and of KDA's output."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.norm import cuda, reference

__all__ = ["fused_add_rms_norm", "gated_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension; see reference.rms_norm."""
    if dispatch.use_triton(x):
        from sgling_kernel.norm import kernel

        if dispatch.usable("norm.cuda", cuda.why_not_rows(x, weight)):
            return cuda.rms_norm(x, weight, eps)
        return kernel.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, new residual) of x + residual; see reference.fused_add_rms_norm."""
    if dispatch.use_triton(x):
        from sgling_kernel.norm import kernel

        if dispatch.usable("norm.cuda", cuda.why_not_rows(x, residual, weight)):
            return cuda.fused_add_rms_norm(x, residual, weight, eps)
        return kernel.fused_add_rms_norm(x, residual, weight, eps)
    return reference.fused_add_rms_norm(x, residual, weight, eps)


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """KDA output norm with its sigmoid gate; see reference.gated_rms_norm."""
    if dispatch.use_triton(o):
        from sgling_kernel.norm import kernel

        return kernel.gated_rms_norm(o, z, weight, eps)
    return reference.gated_rms_norm(o, z, weight, eps)
