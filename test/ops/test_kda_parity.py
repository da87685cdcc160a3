"""KDA state parity: verify + commit(n) is n decode steps, bit for bit; rows do not see their neighbours."""

import pytest
import torch

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

LAYERS = 2
SHAPES = [(2, 32), (4, 64), (1, 128), (3, 8)]


def setup_round(heads, dim, bs, width, dtype=torch.float32, padded=2):
    """bs requests in shuffled slots, then ``padded`` rows on slot 0; rows per layer are request-major [bs, W]."""
    layers = [make_params(heads, dim) for _ in range(LAYERS)]
    pools = make_pools(LAYERS, bs + 3, heads, dim, dtype)
    slots = torch.cat([torch.randperm(bs + 2)[:bs] + 1, torch.zeros(padded, dtype=torch.int64)])
    seq_lens = torch.cat([torch.randint(0, 50, (bs,)), torch.zeros(padded, dtype=torch.int64)])
    rows = [make_rows((bs + padded) * width, heads, dim, dtype) for _ in layers]
    return layers, pools, slots, seq_lens, rows


def decode_snapshots(layers, rows, pools, slots, bs, width):
    """W decode steps of the first bs requests: pools after 0..W steps, o [Lk, bs, W, ..]."""
    pools, snapshots, outputs = pools.clone(), [pools.clone()], []
    for j in range(width):
        step = [r.pick(torch.arange(bs) * width + j) for r in rows]
        outputs.append(decode(layers, step, pools, slots[:bs]))
        snapshots.append(pools.clone())
    return snapshots, torch.stack(outputs, 2)


def expected_pools(snapshots, slots, accept) -> Pools:
    """Each request's slot from the snapshot after its own number of decode steps; other slots as before."""
    want = snapshots[0].clone()
    for slot, n in zip(slots.tolist(), accept.tolist(), strict=True):
        for pool, source in zip(want, snapshots[n], strict=True):
            pool[:, slot] = source[:, slot]
    return want


def assert_same_pools(got, want):
    """Every slot except the dummy."""
    assert same_bits(got.state[:, 1:], want.state[:, 1:])
    assert same_bits(got.conv[:, 1:], want.conv[:, 1:])


def check_parity(scheme, heads, dim, bs, width, dtype=torch.float32):
    layers, pools, slots, seq_lens, rows = setup_round(heads, dim, bs, width, dtype)
    snapshots, plain = decode_snapshots(layers, rows, pools, slots, bs, width)
    store = make_store(scheme, pools, width)
    out = verify(scheme, layers, rows, pools, slots, seq_lens, width, store)
    assert same_bits(out[:, :bs], plain)
    assert_same_pools(pools, snapshots[0])
    for first in range(width + 1):
        accept = torch.zeros_like(slots)
        accept[:bs] = (torch.arange(bs) + first) % (width + 1)
        got = pools.clone()
        commit(scheme, got, store, slots, seq_lens, accept, width)
        assert_same_pools(got, expected_pools(snapshots, slots[:bs], accept[:bs]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", range(1, 9))
def test_every_accept_length_equals_that_many_decode_steps(scheme, width):
    for bs in (1, 2, 5):
        check_parity(scheme, 2, 32, bs, width)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("heads,dim", SHAPES)
def test_parity_holds_for_every_head_shape_and_in_bf16(scheme, heads, dim):
    for dtype in (torch.float32, torch.bfloat16):
        check_parity(scheme, heads, dim, 3, 4, dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_rounds_wrap_the_ring_and_stay_on_the_decode_path(scheme):
    heads, dim, bs, width = 2, 32, 3, 4
    layers, pools, slots, seq_lens, _ = setup_round(heads, dim, bs, width, padded=1)
    plain, store = pools.clone(), make_store(scheme, pools, width, ring=8)
    for round_index in range(12):
        rows = [make_rows((bs + 1) * width, heads, dim) for _ in layers]
        accept = torch.tensor([1 + (round_index + r) % width for r in range(bs)] + [0])
        snapshots, _ = decode_snapshots(layers, rows, plain, slots, bs, width)
        plain = expected_pools(snapshots, slots[:bs], accept[:bs])
        verify(scheme, layers, rows, pools, slots, seq_lens, width, store)
        commit(scheme, pools, store, slots, seq_lens, accept, width)
        seq_lens = seq_lens + accept
        assert_same_pools(pools, plain)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_store_wider_than_the_step_serves_every_smaller_width(scheme):
    layers, pools, slots, seq_lens, rows = setup_round(2, 32, 2, 3)
    snapshots, _ = decode_snapshots(layers, rows, pools, slots, 2, 3)
    store = make_store(scheme, pools, 8)
    accept = torch.tensor([3, 1, 0, 0])
    verify(scheme, layers, rows, pools, slots, seq_lens, 3, store)
    commit(scheme, pools, store, slots, seq_lens, accept, 3)
    assert_same_pools(pools, expected_pools(snapshots, slots[:2], accept[:2]))


@pytest.mark.parametrize("heads,dim", SHAPES)
def test_decode_row_is_the_same_alone_and_in_a_batch_of_five(heads, dim):
    layers, pools, slots, _, rows = setup_round(heads, dim, 5, 1, padded=0)
    together, alone = pools.clone(), pools.clone()
    out = decode(layers, rows, together, slots)
    for r in range(5):
        one = decode(layers, [x.pick(slice(r, r + 1)) for x in rows], alone, slots[r : r + 1])
        assert same_bits(one, out[:, r : r + 1])
    assert_same_pools(alone, together)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("heads,dim", SHAPES)
def test_verify_row_is_the_same_alone_and_in_a_batch_of_five(scheme, heads, dim):
    for width in (1, 3, 4, 6):
        layers, pools, slots, seq_lens, rows = setup_round(heads, dim, 5, width, padded=0)
        store, own = (make_store(scheme, pools, width, fill=0.0) for _ in range(2))
        out = verify(scheme, layers, rows, pools, slots, seq_lens, width, store)
        for r in range(5):
            mine = [x.pick(slice(r * width, (r + 1) * width)) for x in rows]
            one = verify(scheme, layers, mine, pools, slots[r : r + 1], seq_lens[r : r + 1], width, own)
            assert same_bits(one, out[:, r : r + 1])
        assert all(same_bits(a, b) for a, b in zip(own, store, strict=True))


def test_bits_do_not_depend_on_the_thread_count_or_on_strided_projections():
    heads, dim, bs, width = 4, 64, 9, 8
    layers, pools, slots, seq_lens, rows = setup_round(heads, dim, bs, width, padded=0)
    fused = [torch.cat(r, 1) for r in rows]
    strided = [type(r)(*x.split([t.shape[1] for t in r], 1)) for r, x in zip(rows, fused, strict=True)]
    store, own = (make_store("replay", pools, width, fill=0.0) for _ in range(2))
    out = verify("replay", layers, rows, pools, slots, seq_lens, width, store)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again = verify("replay", layers, strided, pools, slots, seq_lens, width, own)
    finally:
        torch.set_num_threads(before)
    assert same_bits(again, out)
    assert all(same_bits(a, b) for a, b in zip(own, store, strict=True))
