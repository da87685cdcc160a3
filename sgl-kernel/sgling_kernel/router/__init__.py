"""Group-limited top-k expert routing with selection bias (noaux_tc)."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.router import cuda, reference
from sgling_kernel.router.reference import RouterConfig

__all__ = ["RouterConfig", "grouped_topk"]


def grouped_topk(logits: Tensor, bias: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """(weights, ids) of the chosen experts; see reference.grouped_topk."""
    if dispatch.use_triton(logits):
        from sgling_kernel.router import kernel

        if dispatch.usable("router.cuda", cuda.why_not(logits, bias, config)):
            return cuda.grouped_topk(logits, bias, config)
        if dispatch.usable("router.kernel", kernel.why_not_kernel(config, logits.shape[1])):
            return kernel.grouped_topk(logits, bias, config)
    return reference.grouped_topk(logits, bias, config)
