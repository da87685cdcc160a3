"""Group-limited top-k in CUDA C++ (topk.cu): one CTA per row, one thread per expert, one node."""

import torch
from torch import Tensor

from sgling_kernel import cuda
from sgling_kernel.router.reference import RouterConfig

_SIZES = (32, 64, 128, 256, 512)
_WARP = 32


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
