"""Routing in CUDA C++: top-k (topk.cu: one CTA per row, one thread per expert), norm and logits (norm_product.cu)."""

import torch
from torch import Tensor

from sgling_kernel import cuda
from sgling_kernel.cuda.operands import why_not_dense, why_not_rows
from sgling_kernel.router.reference import RouterConfig

_SIZES = (32, 64, 128, 256, 512)
_WARP = 32
_BLOCK, _SHORT, _LONG = 32, 512, 2560  # columns of the rows that are normed and multiplied in one node
_MAX_SHARE = 6  # tokens of a CTA
NORM_PRODUCT_ROWS = 16  # above, two nodes are faster (H200: nine rows gain 0.9 % of a verify, 17 lose 0.6 %)


def why_not(logits: Tensor, bias: Tensor, config: RouterConfig) -> str | None:
    """Reason why the CUDA kernel cannot route these rows, or None."""
    if logits.shape[1] not in _SIZES:
        return f"{logits.shape[1]} experts: the CUDA top-k is built for {_SIZES}"
    if _WARP % config.n_group or config.top_k > _WARP:
        return f"{config.n_group} groups, top {config.top_k}: the CUDA top-k takes divisors of 32, and at most 32"
    if any(x.dtype != torch.float32 or not x.is_contiguous() or x.data_ptr() % 16 for x in (logits, bias)):
        return "the CUDA top-k takes contiguous fp32 logits and bias"
    return cuda.why_not()


def grouped_topk(logits: Tensor, bias: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """reference.grouped_topk."""
    rows, experts = logits.shape
    config.check(experts)
    weights = torch.empty(rows, config.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, config.top_k, dtype=torch.int64, device=logits.device)
    if rows:
        cuda.launch(
            cuda.function("router/topk.cu", "grouped_topk"), weights, ids, logits, bias, rows, experts,
            config.n_group, config.topk_group, config.top_k, int(config.norm_topk_prob), config.routed_scaling_factor,
        )  # fmt: skip
    return weights, ids


def why_not_norm_product(x: Tensor, residual: Tensor, norm_weight: Tensor, w: Tensor) -> str | None:
    """Reason why one node cannot add, norm and multiply: x, residual [N, K], norm_weight [K], w [E, K]; or None."""
    if (reason := cuda.why_not() or why_not_rows("x", x) or why_not_rows("the residual", residual)) is not None:
        return reason
    if (reason := why_not_dense("the norm's weight", norm_weight) or why_not_dense("the router", w)) is not None:
        return reason
    width = x.shape[1]
    if width % _BLOCK or (width > _SHORT and width != _LONG):
        return f"rows of {width} values: it takes multiples of {_BLOCK} up to {_SHORT}, and {_LONG}"
    return None


def tokens_per_cta(rows: int) -> int:
    """Tokens that one CTA norms and multiplies; more CTAs norm less each and read the router's weights more often."""
    return min(_MAX_SHARE, -(-rows // 3))


def add_rms_norm_router(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, w: Tensor, share: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """reference.add_rms_norm_router; the residual must be older than the node before.

    share: tokens of a CTA, one to six, which changes no bit (RuntimeError for others); None = :func:`tokens_per_cta`.
    """
    (count, width), experts = x.shape, w.shape[0]
    rows = torch.empty(2, count, width, dtype=x.dtype, device=x.device)
    logits = torch.empty(count, experts, dtype=torch.float32, device=x.device)
    if count:
        cuda.launch(
            cuda.function("router/norm_product.cu", "norm_product"), rows[0], rows[1], logits, x, residual,
            norm_weight, w, x.stride(0), residual.stride(0), count, width, experts, share or tokens_per_cta(count), eps,
        )  # fmt: skip
    return rows[0], rows[1], logits
