"""Expert routing: logits of the normed stream, and group-limited top-k with selection bias (noaux_tc)."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.linear import linear_fp32
from sgling_kernel.norm import fused_add_rms_norm
from sgling_kernel.router import cuda, reference
from sgling_kernel.router.reference import RouterConfig

__all__ = ["RouterConfig", "add_rms_norm_router", "grouped_topk"]


def add_rms_norm_router(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, router_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, new residual, router logits) of x + residual; see reference.add_rms_norm_router.

    Narrow steps on a GPU run it as one node, with the bits of the two it stands for. It reads the residual early:
    between the node that wrote it and this one must lie another.
    """
    if dispatch.use_triton(x) and x.shape[0] <= cuda.NORM_PRODUCT_ROWS:
        reason = cuda.why_not_norm_product(x, residual, norm_weight, router_weight)
        if dispatch.usable("router.norm_product", reason):
            return cuda.add_rms_norm_router(x, residual, norm_weight, eps, router_weight)
    normed, new_residual = fused_add_rms_norm(x, residual, norm_weight, eps)
    return normed, new_residual, linear_fp32(normed, router_weight)


def grouped_topk(logits: Tensor, bias: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """(weights, ids) of the chosen experts; see reference.grouped_topk."""
    if dispatch.use_triton(logits):
        from sgling_kernel.router import kernel

        if dispatch.usable("router.cuda", cuda.why_not(logits, bias, config)):
            return cuda.grouped_topk(logits, bias, config)
        if dispatch.usable("router.kernel", kernel.why_not_kernel(config, logits.shape[1])):
            return kernel.grouped_topk(logits, bias, config)
    return reference.grouped_topk(logits, bias, config)
