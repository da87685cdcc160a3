"""KDA decode, verify and both commits in CUDA C++ (chain.cu, commit.cu): bf16 rows, fp32 state, one node each."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sgling_kernel import cuda
from sgling_kernel.kda.params import KDAParams, ReplayRing, StagedBuffers

CHAIN, COMMIT = "kda/chain.cu", "kda/commit.cu"
HEAD_DIMS = (32, 64, 128)
COMMIT_VALUE_ROWS = 32
DECODE, STAGED, REPLAY = 0, 1, 2
UNIT = 16  # bytes per element of the copy in commit_staged
MAX_COUNTERS = 1 << 16


class Grid(NamedTuple):
    """How the chain is cut into CTAs; bits do not depend on it.

    Attributes:
        value_rows: value rows of a head per CTA: 4, 8, 16 or 32, at most 4 per warp.
        warps: 2 .. 12; all of them prepare rows, value_rows / 4 walk the chain.
    """

    value_rows: int
    warps: int


def default_grid(width: int, chains: int) -> Grid:
    """Cut for windows of ``width`` rows and ``chains`` = requests · heads (scripts/tune_kda.py measures others)."""
    value_rows = 8 if chains <= 16 else 16 if chains <= 32 else 32
    warps = 3 if width == 1 else 8 if width <= 7 else 12  # one row each, and v
    return Grid(value_rows, max(warps, value_rows // 4))


def why_not(conv_pool: Tensor, state_pool: Tensor) -> str | None:
    """Reason why these kernels cannot serve such pools, or None. The same for decode, verify and commit."""
    if conv_pool.dtype != torch.bfloat16 or state_pool.dtype != torch.float32:
        return f"the CUDA KDA kernels take bf16 rows and fp32 states, not {conv_pool.dtype} and {state_pool.dtype}"
    if state_pool.shape[-1] not in HEAD_DIMS:
        return f"the CUDA KDA kernels are built for head sizes {HEAD_DIMS}, not {state_pool.shape[-1]}"
    return cuda.why_not()


@cache
def _counters(device: torch.device, storage: int) -> Tensor:
    """Arrival counters of the decode of one set of pools: zeros, and every launch leaves zeros."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first KDA decode on a set of pools must run before a graph captures one")
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def _arrivals(conv_pool: Tensor, chains: int) -> Tensor:
    if chains > MAX_COUNTERS:
        raise ValueError(f"requests * heads = {chains} exceeds {MAX_COUNTERS}")
    return _counters(conv_pool.device, conv_pool.untyped_storage().data_ptr())


def _is_aligned(x: Tensor, channels: int) -> bool:
    size = channels * x.element_size()
    return x.data_ptr() % size == 0 and x.stride(0) * x.element_size() % size == 0


def chain(
    inputs: tuple[Tensor, Tensor, Tensor],
    p: KDAParams,
    pools: tuple[Tensor, Tensor, Tensor],
    window: tuple[Tensor | None, int],
    mode: int,
    store: tuple[Tensor | int | None, ...],
    grid: Grid | None = None,
) -> Tensor:
    """Launch the chain over whole windows.

    ``inputs`` (qkv, f, b) with any row stride; ``pools`` (conv, state, slots), dense; ``window`` (seq_lens, width);
    ``store`` (x, k, v, g, beta, arrivals, depth) as ``Chain`` in chain.cu names them -> o [N, H, V].
    """
    (conv_pool, state_pool, slots), (seq_lens, width), (*kept, depth) = pools, window, store
    heads, dim = p.dt_bias.shape
    requests = slots.shape[0]
    out = torch.empty(inputs[0].shape[0], heads, dim, dtype=inputs[0].dtype, device=inputs[0].device)
    cut = grid or default_grid(width, requests * heads)
    aligned = all(_is_aligned(x, dim // 32) for x in (*inputs[:2], conv_pool))
    cuda.launch(
        cuda.function(CHAIN, "kda_chain"), out, *inputs, *(x.stride(0) for x in inputs),
        p.conv_weight, p.a_log, p.dt_bias, conv_pool, state_pool, slots, seq_lens, *kept, depth,
        heads, dim, requests, width, mode, cut.value_rows, cut.warps, int(aligned), p.lower_bound, dim**-0.5,
    )  # fmt: skip
    return out


def kda_decode(
    qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, conv_pool: Tensor, state_pool: Tensor, state_slots: Tensor
) -> Tensor:
    """reference.kda_decode."""
    counters = _arrivals(conv_pool, state_slots.shape[0] * p.dt_bias.shape[0])
    store = (None,) * 5 + (counters, 1)
    return chain((qkv, f, b), p, (conv_pool, state_pool, state_slots), (None, 1), DECODE, store)


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
    """reference.kda_verify_staged; ``stage`` is one layer's, contiguous."""
    depth = stage.state.shape[1]
    if depth < width:
        raise ValueError(f"a stage of {depth} rows cannot hold a window of {width}")
    store = (stage.conv, None, None, stage.state, None, None, depth)
    return chain((qkv, f, b), p, (conv_pool, state_pool, state_slots), (None, width), STAGED, store)


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
    """reference.kda_verify_replay; ``ring`` is one layer's, contiguous."""
    store = (*ring, None, ring.x.shape[1])
    return chain((qkv, f, b), p, (conv_pool, state_pool, state_slots), (seq_lens, width), REPLAY, store)


def commit_staged(
    conv_pool: Tensor, state_pool: Tensor, stage: StagedBuffers, state_slots: Tensor, accept_lens: Tensor
) -> None:
    """reference.commit_staged: all layers and requests in one launch."""
    layers, num_slots = state_pool.shape[:2]
    units = [pool[0, 0].numel() * pool.element_size() // UNIT for pool in (conv_pool, state_pool)]
    cuda.launch(
        cuda.function(COMMIT, "kda_snapshot"), conv_pool, state_pool, *stage, state_slots, accept_lens,
        layers, num_slots, stage.state.shape[2], *units, state_slots.shape[0],
    )  # fmt: skip


def commit_replay(
    conv_pool: Tensor,
    state_pool: Tensor,
    ring: ReplayRing,
    state_slots: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    width: int,
) -> None:
    """reference.commit_replay: all layers and requests in one launch, work proportional to what was accepted."""
    layers, num_slots, heads, dim, _ = state_pool.shape
    cuda.launch(
        cuda.function(COMMIT, "kda_fold"), conv_pool, state_pool, *ring, state_slots, seq_lens, accept_lens,
        layers, num_slots, ring.x.shape[2], heads, dim, state_slots.shape[0], width, COMMIT_VALUE_ROWS,
    )  # fmt: skip
