"""Where the rows of a forward live: KV slots, positions, state slots."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.cache_locs import reference
from sgling_kernel.cache_locs.reference import context_locs, gather_state_slots, window_locs

__all__ = ["context_locs", "fill_step_metadata", "gather_state_slots", "keep_accepted", "window_locs"]


def fill_step_metadata(
    new_seq_lens: Tensor,
    state_slot: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Lengths, state slots and windows of a step into persistent buffers; see reference.fill_step_metadata."""
    if dispatch.use_triton(rows):
        from sgling_kernel.cache_locs import kernel

        kernel.fill_step_metadata(new_seq_lens, state_slot, req_to_token, rows, out)
        return
    reference.fill_step_metadata(new_seq_lens, state_slot, req_to_token, rows, out)


def keep_accepted(locs: Tensor, accept_lens: Tensor) -> Tensor:
    """Slots of accepted rows, 0 for the others; see reference.keep_accepted."""
    if dispatch.use_triton(locs):
        from sgling_kernel.cache_locs import kernel

        return kernel.keep_accepted(locs, accept_lens)
    return reference.keep_accepted(locs, accept_lens)
