"""Group-limited top-k expert routing with selection bias (noaux_tc)."""

from sgling_kernel.router.reference import RouterConfig, grouped_topk

__all__ = ["RouterConfig", "grouped_topk"]
