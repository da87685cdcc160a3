"""Hand-over of cross-step values through per-request buffers."""

from collections.abc import Sequence

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.relay import reference
from sgling_kernel.relay.reference import poison_relay

__all__ = ["gather_relay", "poison_relay", "scatter_relay", "take_accepted", "window_candidates"]


def scatter_relay(buffers: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor]) -> None:
    """Write values into per-request buffers; see reference.scatter_relay."""
    if dispatch.use_triton(rows):
        from sgling_kernel.relay import kernel

        return kernel.scatter_relay(buffers, rows, values)
    return reference.scatter_relay(buffers, rows, values)


def gather_relay(buffers: Sequence[Tensor], rows: Tensor, out: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """Rows of per-request buffers; see reference.gather_relay."""
    if dispatch.use_triton(rows):
        from sgling_kernel.relay import kernel

        return kernel.gather_relay(buffers, rows, out)
    return reference.gather_relay(buffers, rows, out)


def window_candidates(output_tokens: Tensor, rows: Tensor, drafts: Tensor) -> Tensor:
    """Root and drafts side by side; see reference.window_candidates."""
    if dispatch.use_triton(rows):
        from sgling_kernel.relay import kernel

        return kernel.window_candidates(output_tokens, rows, drafts)
    return reference.window_candidates(output_tokens, rows, drafts)


def take_accepted(sources: Sequence[Tensor], accept_lens: Tensor, width: int) -> tuple[Tensor, ...]:
    """The last accepted row of each window; see reference.take_accepted."""
    if dispatch.use_triton(accept_lens):
        from sgling_kernel.relay import kernel

        return kernel.take_accepted(sources, accept_lens, width)
    return reference.take_accepted(sources, accept_lens, width)
