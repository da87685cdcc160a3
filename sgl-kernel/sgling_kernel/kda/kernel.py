"""KDA decode, verify and commit in Triton: conv, gates, l2 norm and the chain recurrence in one node.

The path without nvcc, and a candidate for narrow windows (form.py). One program owns a tile of BV value rows of one
head of one request and walks the rows of its window in order; the state tile stays in registers. Verify and commit
share ``_delta``; every multiply-add is written as one and the compiler makes none of its own (it might place them
differently in each), so folding the accepted prefix gives the bits of decoding it. The output uses
o = (S e^g) q + u (k q): both reductions of a step run together. Every program waits for the previous node before its
first load of anything but weights (PDL).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.kda.params import KDAParams, ReplayRing, StagedBuffers
from sgling_kernel.kda.recurrence import L2_EPS
from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

VALUE_TILE = 4  # value rows per program, one warp: part of the numerics
ROLL_BLOCK, COPY_BLOCK = 1024, 4096
DECODE, STAGED, REPLAY = 0, 1, 2


@triton.jit
def _delta(state, k, v, decay, beta):
    """One token of the delta rule -> (decayed state, update u, new state); state [BV, BK], k, decay [BK], v [BV]."""
    decayed = state * decay[None, :]
    update = beta * (v - tl.sum(decayed * k[None, :], 1))
    new_state = tl.fma(tl.broadcast_to(update[:, None], state.shape), tl.broadcast_to(k[None, :], state.shape), decayed)
    return decayed, update, new_state


@triton.jit
def _l2(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def _row(pointer, channel, mask):
    return tl.load(pointer + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _projected(x, q, k, v, k_in, v_in):
    """One row's q, k and v before the convolution, at the channels of one program."""
    return _row(x, q, k_in), _row(x, k, k_in), _row(x, v, v_in)


@triton.jit
def _taps(weight, channel, mask):
    """The four conv taps of some channels, oldest first."""
    at = weight + channel * 4
    first, second = tl.load(at, mask=mask, other=0.0), tl.load(at + 1, mask=mask, other=0.0)
    return first, second, tl.load(at + 2, mask=mask, other=0.0), tl.load(at + 3, mask=mask, other=0.0)


@triton.jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3, dtype: tl.constexpr):
    """Four taps, oldest first, then SiLU and the rounding."""
    y = tl.fma(x3, w3, tl.fma(x2, w2, tl.fma(x1, w1, x0 * w0)))
    return (y / (1.0 + tl.exp(-y))).to(dtype)


@triton.jit
def _store_window(at, oldest, middle, newest, channel, mask, C: tl.constexpr):
    tl.store(at + channel, oldest.to(at.dtype.element_ty), mask=mask)
    tl.store(at + C + channel, middle.to(at.dtype.element_ty), mask=mask)
    tl.store(at + 2 * C + channel, newest.to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["W"])
def _chain_kernel(
    inputs, strides, layer, conv_pool, state_pool, slots, seq_lens, out, store, constants, W,
    H: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, MODE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inputs qkv, f, b and their row strides; layer conv_weight, a_log, dt_bias; constants lower_bound, scale, eps.

    MODE 2 (replay) writes x, k, v, g, beta of a ring of DEPTH entries; 1 (staged) conv windows to ``store_x`` and
    states to ``store_g``, DEPTH per slot; 0 (decode, W = 1) the state itself."""
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    qkv, f, b = inputs
    stride_qkv, stride_f, stride_b = strides
    conv_weight, a_log, dt_bias = layer
    store_x, store_k, store_v, store_g, store_beta = store
    lower_bound, scale, eps = constants
    C: tl.constexpr = 3 * H * K
    kc, vc = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    k_in, v_in = kc < K, vc < K
    qch, kch, vch = head * K + kc, H * K + head * K + kc, 2 * H * K + head * K + vc
    at = head * (K * K) + vc[:, None] * K + kc[None, :]
    inside = v_in[:, None] & k_in[None, :]
    rate = tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head * K + kc, mask=k_in, other=0.0)
    qw0, qw1, qw2, qw3 = _taps(conv_weight, qch, k_in)
    kw0, kw1, kw2, kw3 = _taps(conv_weight, kch, k_in)
    vw0, vw1, vw2, vw3 = _taps(conv_weight, vch, v_in)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    slot = tl.load(slots + request)
    state = tl.load(state_pool + slot * (H * K * K) + at, mask=inside, other=0.0)
    window = conv_pool + slot * (3 * C)
    q0, q1, q2 = _row(window, qch, k_in), _row(window + C, qch, k_in), _row(window + 2 * C, qch, k_in)
    k0, k1, k2 = _row(window, kch, k_in), _row(window + C, kch, k_in), _row(window + 2 * C, kch, k_in)
    v0, v1, v2 = _row(window, vch, v_in), _row(window + C, vch, v_in), _row(window + 2 * C, vch, v_in)
    n = request.to(tl.int64) * W
    q3, k3, v3 = _projected(qkv + n * stride_qkv, qch, kch, vch, k_in, v_in)
    decay_in = _row(f + n * stride_f, head * K + kc, k_in)
    beta_in = tl.load(b + n * stride_b + head).to(tl.float32)
    for j in range(W):
        n = request.to(tl.int64) * W + j
        following = n + (j + 1 < W)  # the next row's loads are issued before this row's arithmetic
        q4, k4, v4 = _projected(qkv + following * stride_qkv, qch, kch, vch, k_in, v_in)
        next_decay = _row(f + following * stride_f, head * K + kc, k_in)
        next_beta = tl.load(b + following * stride_b + head).to(tl.float32)
        q = _convolved(q0, q1, q2, q3, qw0, qw1, qw2, qw3, out.dtype.element_ty)
        k = _convolved(k0, k1, k2, k3, kw0, kw1, kw2, kw3, out.dtype.element_ty)
        v = _convolved(v0, v1, v2, v3, vw0, vw1, vw2, vw3, out.dtype.element_ty)
        g = lower_bound / (1.0 + tl.exp(-(rate * (decay_in + bias))))
        beta = 1.0 / (1.0 + tl.exp(-beta_in))
        if MODE == 2:
            entry = slot * DEPTH + ((tl.load(seq_lens + request) + j) & (DEPTH - 1))
            tl.store(store_v + entry * (H * K) + head * K + vc, v, mask=v_in)
            tl.store(store_x + entry * C + vch, v3.to(out.dtype.element_ty), mask=v_in)
            if tile == 0:
                tl.store(store_x + entry * C + qch, q3.to(out.dtype.element_ty), mask=k_in)
                tl.store(store_x + entry * C + kch, k3.to(out.dtype.element_ty), mask=k_in)
                tl.store(store_k + entry * (H * K) + head * K + kc, k, mask=k_in)
                tl.store(store_g + entry * (H * K) + head * K + kc, g, mask=k_in)
                tl.store(store_beta + entry * H + head, beta)
        query, key = _l2(q.to(tl.float32), eps) * scale, _l2(k.to(tl.float32), eps)
        decayed, update, state = _delta(state, key, v.to(tl.float32), tl.exp(g), beta)
        o = tl.fma(update, tl.broadcast_to(tl.sum(key * query, 0), update.shape), tl.sum(decayed * query[None, :], 1))
        tl.store(out + n * (H * K) + head * K + vc, o.to(out.dtype.element_ty), mask=v_in)
        q0, q1, q2 = q1, q2, q3
        k0, k1, k2 = k1, k2, k3
        v0, v1, v2 = v1, v2, v3
        if MODE == 1:
            entry = slot * DEPTH + j
            tl.store(store_g + entry * (H * K * K) + at, state, mask=inside)
            _store_window(store_x + entry * (3 * C), v0, v1, v2, vch, v_in, C)
            if tile == 0:
                _store_window(store_x + entry * (3 * C), q0, q1, q2, qch, k_in, C)
                _store_window(store_x + entry * (3 * C), k0, k1, k2, kch, k_in, C)
        q3, k3, v3, decay_in, beta_in = q4, k4, v4, next_decay, next_beta
    if MODE == 0:
        tl.store(state_pool + slot * (H * K * K) + at, state, mask=inside)


@triton.jit
def _roll_window_kernel(qkv, conv_pool, slots, stride_qkv, C: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Shift the conv window of a slot by one row; apart from the chain, whose tiles all read the old window."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    request = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    window = conv_pool + tl.load(slots + request) * (3 * C)
    second, third = _row(window + C, c, mask), _row(window + 2 * C, c, mask)
    newest = _row(qkv + request.to(tl.int64) * stride_qkv, c, mask)
    _store_window(window, second, third, newest, c, mask, C)


@triton.jit(do_not_specialize=["num_slots", "bs"])
def _snapshot_kernel(
    conv_pool, state_pool, conv_stage, state_stage, slots, accept_lens, num_slots, bs,
    CONV: tl.constexpr, STATE: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the snapshot behind the last accepted row into a slot; grid (blocks of a slot, layers * requests)."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    request, layer = tl.program_id(1) % bs, (tl.program_id(1) // bs).to(tl.int64)
    accept = tl.load(accept_lens + request)
    base = layer * num_slots + tl.load(slots + request)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = base * DEPTH + accept - 1
    in_state, in_conv = (i < STATE) & (accept > 0), (i < CONV) & (accept > 0)
    state = tl.load(state_stage + source * STATE + i, mask=in_state)
    conv = tl.load(conv_stage + source * CONV + i, mask=in_conv)
    tl.store(state_pool + base * STATE + i, state, mask=in_state)
    tl.store(conv_pool + base * CONV + i, conv, mask=in_conv)


@triton.jit
def _window_row(window, ring_x, base, start, index, channel, mask, C: tl.constexpr, RING: tl.constexpr):
    """Row ``index`` of the stored window followed by the ring's rows from position ``start`` on."""
    old = tl.load(window + index * C + channel, mask=mask & (index < 3), other=0.0)
    entry = base * RING + ((start + index - 3) & (RING - 1))
    new = tl.load(ring_x + entry * C + channel, mask=mask & (index >= 3), other=0.0)
    return tl.where(index < 3, old, new)


@triton.jit(do_not_specialize=["num_slots", "bs"])
def _commit_kernel(
    conv_pool, state_pool, ring_x, ring_k, ring_v, ring_g, ring_beta, slots, seq_lens, accept_lens, num_slots, bs, eps,
    H: tl.constexpr, K: tl.constexpr, RING: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold the first accept_len ring entries into a slot; grid (value tiles, heads, layers * requests)."""
    pdl_wait(PDL)
    pdl_trigger(PDL)
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2) % bs
    layer = (tl.program_id(2) // bs).to(tl.int64)
    C: tl.constexpr = 3 * H * K
    accept, start = tl.load(accept_lens + request), tl.load(seq_lens + request)
    base = layer * num_slots + tl.load(slots + request)
    kc, vc = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    k_in, v_in = kc < K, vc < K
    if accept > 0:
        at = base * (H * K * K) + head * (K * K) + vc[:, None] * K + kc[None, :]
        inside = v_in[:, None] & k_in[None, :]
        state = tl.load(state_pool + at, mask=inside, other=0.0)
        for j in range(accept):
            entry = base * RING + ((start + j) & (RING - 1))
            row = entry * (H * K) + head * K
            key = _l2(_row(ring_k + row, kc, k_in), eps)
            decay = tl.exp(_row(ring_g + row, kc, k_in))
            _, _, state = _delta(state, key, _row(ring_v + row, vc, v_in), decay, tl.load(ring_beta + entry * H + head))
        tl.store(state_pool + at, state, mask=inside)
        if tile == 0:
            window = conv_pool + base * (3 * C)
            for part in tl.static_range(3):
                c = part * (H * K) + head * K + kc
                oldest = _window_row(window, ring_x, base, start, accept, c, k_in, C, RING)
                middle = _window_row(window, ring_x, base, start, accept + 1, c, k_in, C, RING)
                newest = _window_row(window, ring_x, base, start, accept + 2, c, k_in, C, RING)
                _store_window(window, oldest, middle, newest, c, k_in, C)


def _chain(qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, pools: tuple, index: tuple, mode: int, store: tuple):
    """Launch the chain; pools (conv, state, slots), index (seq_lens, width), store (x, k, v, g, beta, depth)."""
    (conv_pool, state_pool, slots), (seq_lens, width) = pools, index
    heads, dim = p.dt_bias.shape
    out = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=qkv.device)
    _chain_kernel[(triton.cdiv(dim, VALUE_TILE), heads, slots.shape[0])](
        (qkv, f, b), (qkv.stride(0), f.stride(0), b.stride(0)), (p.conv_weight, p.a_log, p.dt_bias),
        conv_pool, state_pool, slots, seq_lens, out, store[:5], (p.lower_bound, dim**-0.5, L2_EPS), width,
        H=heads, K=dim, DEPTH=store[5], MODE=mode, BK=triton.next_power_of_2(dim), BV=VALUE_TILE,
        num_warps=1, enable_fp_fusion=False, **launch_pdl(qkv),
    )  # fmt: skip
    return out


def kda_decode(
    qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, conv_pool: Tensor, state_pool: Tensor, state_slots: Tensor
) -> Tensor:
    """reference.kda_decode; rows of qkv, f and b may be strided."""
    unused = (state_pool,) * 5
    out = _chain(
        qkv, f, b, p, (conv_pool, state_pool, state_slots), (state_slots, 1), DECODE, (*unused, 1)
    )  # fmt: skip
    channels = qkv.shape[1]
    grid = (triton.cdiv(channels, ROLL_BLOCK), state_slots.shape[0])
    _roll_window_kernel[grid](
        qkv, conv_pool, state_slots, qkv.stride(0), C=channels, BLOCK=ROLL_BLOCK, num_warps=4, **launch_pdl(qkv)
    )
    return out


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
    store = (stage.conv, state_pool, state_pool, stage.state, state_pool, stage.state.shape[1])
    pools = (conv_pool, state_pool, state_slots)
    return _chain(qkv, f, b, p, pools, (state_slots, width), STAGED, store)


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
    store = (ring.x, ring.k, ring.v, ring.g, ring.beta, ring.x.shape[1])
    pools = (conv_pool, state_pool, state_slots)
    return _chain(qkv, f, b, p, pools, (seq_lens, width), REPLAY, store)


def commit_staged(
    conv_pool: Tensor, state_pool: Tensor, stage: StagedBuffers, state_slots: Tensor, accept_lens: Tensor
) -> None:
    """reference.commit_staged: all layers and requests in one launch."""
    (layers, num_slots), bs = state_pool.shape[:2], state_slots.shape[0]
    conv, state = conv_pool[0, 0].numel(), state_pool[0, 0].numel()
    _snapshot_kernel[(triton.cdiv(max(conv, state), COPY_BLOCK), layers * bs)](
        conv_pool, state_pool, *stage, state_slots, accept_lens, num_slots, bs,
        CONV=conv, STATE=state, DEPTH=stage.state.shape[2], BLOCK=COPY_BLOCK, num_warps=4, **launch_pdl(state_pool),
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
    """reference.commit_replay: all layers in one launch, work proportional to what was accepted."""
    layers, num_slots, heads, dim, _ = state_pool.shape
    bs = state_slots.shape[0]
    _commit_kernel[(triton.cdiv(dim, VALUE_TILE), heads, layers * bs)](
        conv_pool, state_pool, ring.x, ring.k, ring.v, ring.g, ring.beta, state_slots, seq_lens, accept_lens,
        num_slots, bs, L2_EPS,
        H=heads, K=dim, RING=ring.x.shape[2], BK=triton.next_power_of_2(dim), BV=VALUE_TILE,
        num_warps=1, enable_fp_fusion=False, **launch_pdl(state_pool),
    )  # fmt: skip
