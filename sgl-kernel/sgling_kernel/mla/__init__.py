"""Multi-head latent attention: cache write, expanded prefill, absorbed paged decode and its projections."""

from torch import Tensor

from sgling_kernel.mla import cpu
from sgling_kernel.mla.context import PagedContext
from sgling_kernel.mla.reference import absorb_q, expand_v, head_gate, write_kv

__all__ = ["PagedContext", "absorb_q", "expand_v", "head_gate", "mla_decode", "mla_prefill", "write_kv"]


def mla_prefill(q: Tensor, kv: Tensor, w_kc: Tensor, w_vc: Tensor, prefix_len: int, scale: float) -> Tensor:
    """Causal attention of one request's chunk; see reference.mla_prefill for shapes and rounding."""
    return cpu.mla_prefill(q, kv, w_kc, w_vc, prefix_len, scale)


def mla_decode(q_lat: Tensor, q_pe: Tensor, kv_pool: Tensor, ctx: PagedContext, scale: float) -> Tensor:
    """Attention of decode or verify rows over the paged cache; see reference.mla_decode for shapes and rounding."""
    return cpu.mla_decode(q_lat, q_pe, kv_pool, ctx, scale)
