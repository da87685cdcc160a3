"""Where the rows of a forward live: KV slots, positions, state slots."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.cache_locs import reference
from sgling_kernel.cache_locs.reference import context_locs, gather_state_slots

__all__ = ["context_locs", "gather_state_slots", "window_locs"]


def window_locs(req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(locs, positions) of ``width`` consecutive rows per request; see reference.window_locs."""
    if dispatch.use_triton(starts):
        from sgling_kernel.cache_locs import kernel

        return kernel.window_locs(req_to_token, req_pool_indices, starts, width)
    return reference.window_locs(req_to_token, req_pool_indices, starts, width)
