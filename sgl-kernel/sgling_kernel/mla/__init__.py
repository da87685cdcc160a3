"""Multi-head latent attention: cache write, expanded prefill, absorbed paged decode and its projections."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.mla import cpu, reference
from sgling_kernel.mla.context import PagedContext
from sgling_kernel.mla.reference import write_kv

__all__ = [
    "PagedContext",
    "absorb_q",
    "expand_v",
    "head_gate",
    "mla_decode",
    "mla_decode_gated",
    "mla_prefill",
    "prepare",
    "prepare_absorbed",
    "write_kv",
]


def prepare(
    pe: Tensor, latent: Tensor, norm: tuple[Tensor, float], rotary: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
) -> Tensor:
    """Rotate queries, normalise and store the rows' own cache entries; see reference.prepare."""
    if dispatch.use_triton(pe):
        from sgling_kernel.mla import kernel

        return kernel.prepare(pe, latent, norm, rotary, cache)
    return reference.prepare(pe, latent, norm, rotary, cache)


def prepare_absorbed(
    q_nope: Tensor,
    w_kc: Tensor,
    pe: Tensor,
    latent: Tensor,
    norm: tuple[Tensor, float],
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Everything between the input projection and absorbed attention: :func:`absorb_q` and :func:`prepare`.

    Returns:
        (absorbed queries [N, H, latent], rotated queries [N, H, rope]).
    """
    if dispatch.use_triton(q_nope):
        from sgling_kernel.mla import cuda

        reason = cuda.why_not_prepare(q_nope, w_kc, pe, latent, norm[0], cache[0])
        if dispatch.usable("mla_prepare.cuda", reason):
            return cuda.prepare_absorbed(q_nope, w_kc, pe, latent, norm, rotary, cache)
    return absorb_q(q_nope, w_kc), prepare(pe, latent, norm, rotary, cache)


def absorb_q(q_nope: Tensor, w_kc: Tensor) -> Tensor:
    """Project queries into the latent; see reference.absorb_q."""
    if dispatch.use_triton(q_nope):
        from sgling_kernel.mla import kernel

        return kernel.per_head(q_nope, w_kc)
    return reference.absorb_q(q_nope, w_kc)


def expand_v(lat: Tensor, w_vc: Tensor) -> Tensor:
    """Project attended latents to values; see reference.expand_v."""
    if dispatch.use_triton(lat):
        from sgling_kernel.mla import kernel

        return kernel.per_head(lat, w_vc)
    return reference.expand_v(lat, w_vc)


def head_gate(o: Tensor, gate_logits: Tensor) -> Tensor:
    """Scale each head by its sigmoid gate; see reference.head_gate."""
    if dispatch.use_triton(o):
        from sgling_kernel.mla import kernel

        return kernel.head_gate(o.contiguous(), gate_logits)
    return reference.head_gate(o, gate_logits)


def mla_prefill(q: Tensor, kv: Tensor, w_kc: Tensor, w_vc: Tensor, prefix_len: int, scale: float) -> Tensor:
    """Causal attention of one request's chunk; see reference.mla_prefill for shapes and rounding."""
    if q.is_cuda:
        from sgling_kernel.mla import gpu

        return gpu.mla_prefill(q, kv, w_kc, w_vc, prefix_len, scale)
    return cpu.mla_prefill(q, kv, w_kc, w_vc, prefix_len, scale)


def mla_decode(q_lat: Tensor, q_pe: Tensor, kv_pool: Tensor, ctx: PagedContext, scale: float) -> Tensor:
    """Attention of decode or verify rows over the paged cache; see reference.mla_decode for shapes and rounding."""
    if dispatch.use_triton(q_lat):
        from sgling_kernel.mla import kernel

        return kernel.mla_decode(q_lat, q_pe, kv_pool, ctx, scale)
    return cpu.mla_decode(q_lat, q_pe, kv_pool, ctx, scale)


def mla_decode_gated(
    q_lat: Tensor, q_pe: Tensor, kv_pool: Tensor, ctx: PagedContext, scale: float, w_vc: Tensor, gate_logits: Tensor
) -> Tensor:
    """:func:`mla_decode`, :func:`expand_v` and :func:`head_gate` in turn: [N, H * v]."""
    if dispatch.use_triton(q_lat):
        from sgling_kernel.mla import cuda

        if dispatch.usable("mla_decode.cuda", cuda.why_not_decode(q_lat, q_pe, kv_pool, ctx, w_vc, gate_logits)):
            return cuda.mla_decode_gated(q_lat, q_pe, kv_pool, ctx, scale, w_vc, gate_logits)
    return head_gate(expand_v(mla_decode(q_lat, q_pe, kv_pool, ctx, scale), w_vc), gate_logits)
