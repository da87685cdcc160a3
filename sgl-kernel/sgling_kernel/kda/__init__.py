"""Kimi Delta Attention: decode, verify with rollback, commit, prefill (projections are done by the caller)."""

from types import ModuleType

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.kda import cpu, reference
from sgling_kernel.kda.params import KDAParams, ReplayRing, StagedBuffers

__all__ = [
    "KDAParams",
    "ReplayRing",
    "StagedBuffers",
    "commit_replay",
    "commit_staged",
    "kda_decode",
    "kda_extend",
    "kda_prefill",
    "kda_verify_replay",
    "kda_verify_staged",
]


def _gpu_form(conv_pool: Tensor, state_pool: Tensor) -> ModuleType:
    """The module whose kernels advance these pools: the same for decode, verify and commit, whatever the width.

    The two forms add in different orders, so a choice by width would let plain decoding and speculation differ.
    """
    from sgling_kernel.kda import cuda, kernel

    if dispatch.usable("kda.cuda", cuda.why_not(conv_pool, state_pool)):
        return cuda
    return kernel


def kda_decode(
    qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, conv_pool: Tensor, state_pool: Tensor, state_slots: Tensor
) -> Tensor:
    """One token per request, pools updated in place; see reference.kda_decode."""
    args = (qkv, f, b, p, conv_pool, state_pool, state_slots)
    if dispatch.use_triton(qkv):
        return _gpu_form(conv_pool, state_pool).kda_decode(*args)
    return reference.kda_decode(*args)


def kda_verify_staged(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    p: KDAParams,
    conv_pool: Tensor,
    state_pool: Tensor,
    state_slots: Tensor,
    width: int,
    stage: StagedBuffers,
) -> Tensor:
    """W rows per request, every post-state staged; see reference.kda_verify_staged."""
    args = (qkv, f, b, p, conv_pool, state_pool, state_slots, width, stage)
    if dispatch.use_triton(qkv):
        return _gpu_form(conv_pool, state_pool).kda_verify_staged(*args)
    return reference.kda_verify_staged(*args)


def kda_verify_replay(
    qkv: Tensor,
    f: Tensor,
    b: Tensor,
    p: KDAParams,
    conv_pool: Tensor,
    state_pool: Tensor,
    state_slots: Tensor,
    seq_lens: Tensor,
    width: int,
    ring: ReplayRing,
) -> Tensor:
    """W rows per request, their inputs kept in the ring; see reference.kda_verify_replay."""
    args = (qkv, f, b, p, conv_pool, state_pool, state_slots, seq_lens, width, ring)
    if dispatch.use_triton(qkv):
        return _gpu_form(conv_pool, state_pool).kda_verify_replay(*args)
    return reference.kda_verify_replay(*args)


def commit_staged(
    conv_pool: Tensor, state_pool: Tensor, stage: StagedBuffers, state_slots: Tensor, accept_lens: Tensor
) -> None:
    """Copy the snapshot behind the last accepted row into the working slots; see reference.commit_staged."""
    args = (conv_pool, state_pool, stage, state_slots, accept_lens)
    if dispatch.use_triton(state_pool):
        _gpu_form(conv_pool, state_pool).commit_staged(*args)
        return
    reference.commit_staged(*args)


def commit_replay(
    conv_pool: Tensor,
    state_pool: Tensor,
    ring: ReplayRing,
    state_slots: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    width: int,
) -> None:
    """Fold the accepted rows of the ring into the working slots, all layers at once; see reference.commit_replay."""
    reference.check_ring(ring.x.shape[2], width)
    args = (conv_pool, state_pool, ring, state_slots, seq_lens, accept_lens, width)
    if dispatch.use_triton(state_pool):
        _gpu_form(conv_pool, state_pool).commit_replay(*args)
        return
    reference.commit_replay(*args)


def kda_prefill(
    qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, conv_window: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """T tokens of one request in the chunk form of plain torch, on any device; see reference.kda_prefill."""
    return cpu.kda_prefill(qkv, f, b, p, conv_window, state)


def kda_extend(
    qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, conv_pool: Tensor, state_pool: Tensor, state_slots: Tensor
) -> Tensor:
    """A chunk of one request's prompt, its slot updated in place; see reference.kda_extend.

    On a GPU through fla-core's chunk kernel where it exists, else :func:`kda_prefill`.
    """
    args = (qkv, f, b, p, conv_pool, state_pool, state_slots)
    if dispatch.use_triton(qkv):
        from sgling_kernel.kda import gpu

        if dispatch.usable("kda.chunk", gpu.why_not_chunk_kda(qkv, p)):
            return gpu.kda_extend(*args)
    return reference.kda_extend(*args, prefill=kda_prefill)
