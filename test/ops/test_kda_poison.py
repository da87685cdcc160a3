"""KDA operators ignore what they must not read, refuse bad buffers, and never read a device value on the host."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ops.kda_case import (
    SCHEMES,
    Pools,
    commit,
    decode,
    make_params,
    make_pools,
    make_rows,
    make_store,
    same_bits,
    verify,
)
from sgling_kernel.kda import kda_prefill
from sgling_kernel.norm import fused_add_rms_norm, gated_rms_norm, rms_norm

HEADS, DIM, WIDTH = 2, 32, 4
SLOTS = torch.tensor([3, 1, 0, 0])
SEQ_LENS = torch.tensor([14, 30, 0, 0])
ACCEPT = torch.tensor([2, 4, 0, 0])


def poisoned(pools: Pools) -> Pools:
    """NaN in every slot no request owns, the dummy included."""
    pools = pools.clone()
    for pool in pools:
        pool[:, [s for s in range(pool.shape[1]) if s not in (1, 3)]] = float("nan")
    return pools


def own_slots(pools: Pools):
    return [pool[:, [1, 3]] for pool in pools]


def one_round(scheme, layers, rows, pools, fill):
    store = make_store(scheme, pools, WIDTH, fill=fill)
    out = verify(scheme, layers, rows, pools, SLOTS, SEQ_LENS, WIDTH, store)
    commit(scheme, pools, store, SLOTS, SEQ_LENS, ACCEPT, WIDTH)
    return out[:, :2]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_in_unused_slots_store_and_padded_rows_changes_nothing(scheme):
    layers, pools = [make_params(HEADS, DIM)], make_pools(1, 6, HEADS, DIM)
    rows = [make_rows(4 * WIDTH, HEADS, DIM)]
    sick_pools, sick_rows = poisoned(pools), [r.pick(slice(None)) for r in rows]
    for tensor in sick_rows[0]:
        tensor[2 * WIDTH :] = float("nan")
    clean = one_round(scheme, layers, rows, pools, fill=0.0)
    sick = one_round(scheme, layers, sick_rows, sick_pools, fill=float("nan"))
    assert same_bits(clean, sick)
    assert all(same_bits(a, b) for a, b in zip(own_slots(pools), own_slots(sick_pools), strict=True))
    assert not any(t.isnan().any() for t in own_slots(sick_pools))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_in_rejected_rows_does_not_reach_the_committed_state(scheme):
    layers, pools = [make_params(HEADS, DIM)], make_pools(1, 6, HEADS, DIM)
    rows = [make_rows(4 * WIDTH, HEADS, DIM)]
    other, sick_rows = pools.clone(), [r.pick(slice(None)) for r in rows]
    for tensor in sick_rows[0]:
        tensor[2:WIDTH] = float("nan")  # request 0 accepts rows 0 and 1 only
    one_round(scheme, layers, rows, pools, fill=0.0)
    one_round(scheme, layers, sick_rows, other, fill=0.0)
    assert all(same_bits(a, b) for a, b in zip(own_slots(pools), own_slots(other), strict=True))


def test_decode_leaves_other_slots_alone_and_padded_rows_touch_only_slot_zero():
    layers, pools = [make_params(HEADS, DIM)], make_pools(1, 6, HEADS, DIM)
    before, rows = pools.clone(), [make_rows(4, HEADS, DIM)]
    decode(layers, rows, pools, SLOTS)
    for pool, old in zip(pools, before, strict=True):
        assert same_bits(pool[:, [2, 4, 5]], old[:, [2, 4, 5]])
    sick = poisoned(before)
    decode(layers, rows, sick, SLOTS)
    assert all(same_bits(a, b) for a, b in zip(own_slots(pools), own_slots(sick), strict=True))


@pytest.mark.parametrize("ring", [4, 12])
def test_replay_ring_must_be_a_power_of_two_of_at_least_two_windows(ring):
    layers, pools = [make_params(HEADS, DIM)], make_pools(1, 6, HEADS, DIM)
    store = make_store("replay", pools, WIDTH, ring=ring)
    rows = [make_rows(4 * WIDTH, HEADS, DIM)]
    with pytest.raises(ValueError, match="power of two"):
        verify("replay", layers, rows, pools, SLOTS, SEQ_LENS, WIDTH, store)
    with pytest.raises(ValueError, match="power of two"):
        commit("replay", pools, store, SLOTS, SEQ_LENS, ACCEPT, WIDTH)


def test_stage_narrower_than_the_step_is_refused():
    layers, pools = [make_params(HEADS, DIM)], make_pools(1, 6, HEADS, DIM)
    store = make_store("staged", pools, WIDTH - 1)
    with pytest.raises(ValueError):
        verify("staged", layers, [make_rows(4 * WIDTH, HEADS, DIM)], pools, SLOTS, SEQ_LENS, WIDTH, store)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_verify_and_commit_run_without_device_values(scheme):
    with FakeTensorMode():
        layers, pools = [make_params(HEADS, DIM)], make_pools(1, 6, HEADS, DIM)
        slots, lens = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        assert decode(layers, [make_rows(4, HEADS, DIM)], pools, slots).shape == (1, 4, HEADS, DIM)
        store = make_store(scheme, pools, WIDTH)
        out = verify(scheme, layers, [make_rows(4 * WIDTH, HEADS, DIM)], pools, slots, lens, WIDTH, store)
        assert out.shape == (1, 4, WIDTH, HEADS, DIM)
        commit(scheme, pools, store, slots, lens, lens, WIDTH)


def test_prefill_and_norms_run_without_device_values():
    with FakeTensorMode():
        window, state = torch.randn(3, 3 * HEADS * DIM), torch.randn(HEADS, DIM, DIM)
        out, new_window, new_state = kda_prefill(*make_rows(700, HEADS, DIM), make_params(HEADS, DIM), window, state)
        assert (out.shape, new_window.shape, new_state.shape) == ((700, HEADS, DIM), window.shape, state.shape)
        x, w = torch.randn(5, HEADS, DIM), torch.randn(DIM)
        for y in (rms_norm(x, w, 1e-6), *fused_add_rms_norm(x, x, w, 1e-6), gated_rms_norm(x, x, w, 1e-6)):
            assert y.shape == x.shape
