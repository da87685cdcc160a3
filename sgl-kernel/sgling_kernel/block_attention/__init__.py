"""Attention of a draft block: its rows see the cached context and each other."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.block_attention import reference
from sgling_kernel.block_attention.reference import RowRotary
from sgling_kernel.mla.context import PagedContext

__all__ = ["RowRotary", "block_attention", "prepare_heads", "prepare_latent"]


def block_attention(
    q: Tensor, keys: Tensor, values: Tensor, ctx: PagedContext, causal: bool, window: int | None, scale: float
) -> Tensor:
    """Attention of block rows over each request's context and the block itself; see reference.block_attention."""
    if dispatch.use_triton(q):
        from sgling_kernel.block_attention import kernel

        if dispatch.usable("block_attention.paged", kernel.why_not_paged(q, keys, values)):
            return kernel.block_attention(q, keys, values, ctx, causal, window, scale)
    return reference.block_attention(q, keys, values, ctx, causal, window, scale)


def prepare_heads(
    x: Tensor, norms: tuple[Tensor, Tensor, float], rotary: RowRotary, cache: tuple[Tensor, Tensor]
) -> Tensor:
    """Normalise and rotate heads, store keys and values; see reference.prepare_heads."""
    if dispatch.use_triton(x):
        from sgling_kernel.block_attention import prepare_kernel

        return prepare_kernel.prepare_heads(x, norms, rotary, cache)
    return reference.prepare_heads(x, norms, rotary, cache)


def prepare_latent(
    pe: Tensor, latent: Tensor, norm: tuple[Tensor, float], rotary: RowRotary, cache: tuple[Tensor, Tensor]
) -> Tensor:
    """Rotate queries and keys, normalise and store latents; see reference.prepare_latent."""
    if dispatch.use_triton(pe):
        from sgling_kernel.block_attention import prepare_kernel

        return prepare_kernel.prepare_latent(pe, latent, norm, rotary, cache)
    return reference.prepare_latent(pe, latent, norm, rotary, cache)
