"""KDA operators in plain torch: the specification, and what serves on a CPU (prefill excepted, see ``cpu.py``).

State parity: for the same inputs, verifying W rows and committing n of them leaves the state and the conv window
bit-equal to n decode steps, under both rollback schemes. Slot 0 of a pool is a dummy which padded rows may write.
Nothing is read back to the host. S slots, bs requests, W rows each, N = bs·W, C = 3·H·K channels q | k | v, Lk layers.
"""

from collections.abc import Callable

import torch

from sgling_kernel.kda.params import KDAParams, ReplayRing, StagedBuffers
from sgling_kernel.kda.recurrence import advance, l2_normalize, row_inputs, run_rows, step_inputs


def kda_decode(
    qkv: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    p: KDAParams,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_slots: torch.Tensor,
) -> torch.Tensor:
    """One token per request; rolls the conv window and the state of each slot in place.

    qkv [bs, C], f [bs, H·K], b [bs, H]; conv_pool [S, 3, C], state_pool fp32 [S, H, V, K], state_slots int64 [bs]
    -> o [bs, H, V] in the dtype of qkv. Several rows may name slot 0.
    """
    inputs = row_inputs(qkv, f, b, p, conv_pool.index_select(0, state_slots), state_pool.dtype)
    states, out = run_rows(state_pool.index_select(0, state_slots), inputs)
    state_pool.index_copy_(0, state_slots, states.squeeze(1))
    conv_pool.index_copy_(0, state_slots, inputs.rows[:, 1:])
    return out.squeeze(1).to(qkv.dtype)


def kda_verify_staged(
    qkv: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    p: KDAParams,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_slots: torch.Tensor,
    width: int,
    stage: StagedBuffers,
) -> torch.Tensor:
    """W rows per request from the committed state; every post-state goes to ``stage``, the pools are only read.

    qkv [N, C], f [N, H·K], b [N, H], request-major; pools as in decode; ``stage`` is this layer's
    -> o [N, H, V]. Errors: ValueError when ``stage`` holds fewer than ``width`` rows.
    """
    if stage.state.shape[1] < width:
        raise ValueError(f"a stage of {stage.state.shape[1]} rows cannot hold a window of {width}")
    inputs = row_inputs(qkv, f, b, p, conv_pool.index_select(0, state_slots), state_pool.dtype)
    states, out = run_rows(state_pool.index_select(0, state_slots), inputs)
    stage.state[:, :width].index_copy_(0, state_slots, states)
    windows = inputs.rows[:, 1:].unfold(1, 3, 1).transpose(2, 3)
    stage.conv[:, :width].index_copy_(0, state_slots, windows)
    return out.to(qkv.dtype).flatten(0, 1)


def check_ring(ring: int, width: int) -> None:
    """Raise ValueError unless the ring is a power of two and holds at least 2·width entries."""
    if ring & (ring - 1) or ring < 2 * width:
        raise ValueError(f"replay ring of {ring} entries: need a power of two >= 2 * width = {2 * width}")


def ring_rows(state_slots: torch.Tensor, seq_lens: torch.Tensor, width: int, ring: int) -> torch.Tensor:
    """Flat ring entries slot·ring + ((seq_len + j) mod ring) of rows j < width: int64 [bs·width].

    Errors: ValueError when the ring is not a power of two or holds fewer than 2·width entries.
    """
    check_ring(ring, width)
    entries = (seq_lens.unsqueeze(1) + torch.arange(width, device=seq_lens.device)) & (ring - 1)
    return (state_slots.unsqueeze(1) * ring + entries).view(-1)


def kda_verify_replay(
    qkv: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    p: KDAParams,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    width: int,
    ring: ReplayRing,
) -> torch.Tensor:
    """W rows per request from the committed state; the inputs of every row go to ``ring``, the pools are only read.

    seq_lens int64 [bs] is the committed length, so row j has position seq_lens + j; the rest as in
    ``kda_verify_staged`` -> o [N, H, V]. Errors: ValueError for a ring that is too short.
    """
    inputs = row_inputs(qkv, f, b, p, conv_pool.index_select(0, state_slots), state_pool.dtype)
    entries = ring_rows(state_slots, seq_lens, width, ring.x.shape[1])
    _, k, v = inputs.qkv.unbind(2)
    for store, rows in zip(ring, (qkv, k, v, inputs.g, inputs.beta), strict=True):
        tail = store.shape[2:]
        store.view(-1, *tail).index_copy_(0, entries, rows.reshape(-1, *tail))
    _, out = run_rows(state_pool.index_select(0, state_slots), inputs)
    return out.to(qkv.dtype).flatten(0, 1)


def commit_staged(
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    stage: StagedBuffers,
    state_slots: torch.Tensor,
    accept_lens: torch.Tensor,
) -> None:
    """Copy the snapshot after row accept_len - 1 into the working slot, all layers at once.

    conv_pool [Lk, S, 3, C], state_pool [Lk, S, H, V, K], stage with the same leading Lk; state_slots, accept_lens
    int64 [bs]. accept_len 0 leaves the slot as it is (that row's copy goes to slot 0).
    """
    snapshot = state_slots * stage.state.shape[2] + (accept_lens - 1).clamp_min(0)
    target = torch.where(accept_lens > 0, state_slots, 0)
    for pool, store in ((conv_pool, stage.conv), (state_pool, stage.state)):
        flat = store.view(store.shape[0], -1, *store.shape[3:])
        pool.index_copy_(1, target, flat.index_select(1, snapshot))


def commit_replay(
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    ring: ReplayRing,
    state_slots: torch.Tensor,
    seq_lens: torch.Tensor,
    accept_lens: torch.Tensor,
    width: int,
) -> None:
    """Fold the accepted rows of the ring into the working slot, all layers at once, in verify's expression order.

    Pools as in ``commit_staged``, ring with leading Lk; seq_lens is the committed length before the step. Rows at and
    past accept_len are computed too but never copied, so what their entries hold (NaN included) changes nothing.
    """
    layers, batch = state_pool.shape[0], state_slots.shape[0]
    entries = ring_rows(state_slots, seq_lens, width, ring.x.shape[2])
    x, k, v, g, beta = (store.view(layers, -1, *store.shape[3:]).index_select(1, entries) for store in ring)

    window = torch.cat([conv_pool.index_select(1, state_slots), x.view(layers, batch, width, -1)], 2)
    first = torch.arange(batch, device=state_slots.device) * (width + 3) + accept_lens
    kept = (first.unsqueeze(1) + torch.arange(3, device=state_slots.device)).view(-1)
    rolled = window.view(layers, batch * (width + 3), -1).index_select(1, kept)
    conv_pool.index_copy_(1, state_slots, rolled.view(layers, batch, 3, -1))

    state = state_pool.index_select(1, state_slots)
    steps = step_inputs(
        *(t.view(layers * batch, width, *t.shape[2:]) for t in (l2_normalize(k.to(g.dtype)), v.to(g.dtype), g, beta))
    )
    states = advance(state.view(-1, *state.shape[2:]), steps)
    last = torch.arange(batch, device=state_slots.device) * width + (accept_lens - 1).clamp_min(0)
    target = torch.where(accept_lens > 0, state_slots, 0)
    state_pool.index_copy_(1, target, states.view(layers, batch * width, *state.shape[2:]).index_select(1, last))


def kda_prefill(
    qkv: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    p: KDAParams,
    conv_window: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """T tokens of one request as T decode steps: the oracle of the chunk form, bit-equal to decode. Keeps T states.

    qkv [T, C], f [T, H·K], b [T, H], conv_window [3, C], state [H, V, K] (fp32; fp64 computes in fp64)
    -> (o [T, H, V], new window, new state); inputs are left as they are. Errors: ValueError for T = 0.
    """
    if qkv.shape[0] == 0:
        raise ValueError("kda_prefill needs at least one token")
    inputs = row_inputs(qkv, f, b, p, conv_window.unsqueeze(0), state.dtype)
    states, out = run_rows(state.unsqueeze(0), inputs)
    return out[0].to(qkv.dtype), inputs.rows[0, -3:].clone(), states[0, -1].clone()


def kda_extend(
    qkv: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    p: KDAParams,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_slots: torch.Tensor,
    prefill: Callable = kda_prefill,
) -> torch.Tensor:
    """A chunk of one request's prompt by ``prefill``: the conv window and the state of its slot move on in place.

    qkv [T, C], f [T, H·K], b [T, H]; pools as in decode, state_slots int64 [1] -> o [T, H, V].
    """
    window, state = conv_pool.index_select(0, state_slots)[0], state_pool.index_select(0, state_slots)[0]
    out, window, state = prefill(qkv, f, b, p, window, state)
    conv_pool.index_copy_(0, state_slots, window[None])
    state_pool.index_copy_(0, state_slots, state[None])
    return out
