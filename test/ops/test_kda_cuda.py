"""The CUDA form of KDA against its reference and against itself: emulated without a GPU, real shapes on one."""

from __future__ import annotations

import pytest
import torch

from ops.kda_case import SCHEMES, Pools, commit, decode, make_params, make_pools, make_rows, make_store, verify
from ops.kda_case import same_bits as equal_bits
from sgling_kernel import cuda as runtime
from sgling_kernel.kda import cuda, reference
from sgling_kernel.kda.cuda import REPLAY, Grid, chain

GPU = torch.cuda.is_available()
BF16, LAYERS = torch.bfloat16, 2
SHAPES = [(2, 128, 17, 3), (8, 128, 6, 1), (4, 64, 9, 2)] if GPU else [(2, 32, 3, 2), (1, 64, 4, 2), (1, 128, 2, 1)]
shapes = pytest.mark.parametrize(("heads", "dim", "width", "bs"), SHAPES)
schemes = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(autouse=True)
def _cuda_form(request):
    """Operators take the CUDA form: on the GPU, or emulated on CPU tensors."""
    if GPU:
        assert runtime.why_not() is None, "nvcc is missing"
        torch.set_default_device("cuda")
        yield
        torch.set_default_device("cpu")
    else:
        request.getfixturevalue("emulated_cuda")
        yield


class Round:
    """bs requests in shuffled slots plus one padded row on slot 0, two layers, rows as slices of one projection."""

    def __init__(self, heads: int, dim: int, width: int, bs: int, pad: int = 8):
        self.width, self.bs = width, bs
        self.layers = [make_params(heads, dim) for _ in range(LAYERS)]
        self.pools = make_pools(LAYERS, bs + 2, heads, dim, BF16)
        self.slots = torch.cat([torch.randperm(bs + 1)[:bs] + 1, torch.zeros(1, dtype=torch.int64)])
        self.seq_lens = torch.cat([torch.randint(5, 60, (bs,)), torch.zeros(1, dtype=torch.int64)])
        self.rows = []
        for _ in self.layers:
            rows = make_rows((bs + 1) * width, heads, dim, BF16)
            whole = torch.cat((torch.zeros(rows.b.shape[0], pad, dtype=BF16), rows.qkv, rows.f, rows.b), 1)
            parts = whole.split([pad, *(t.shape[1] for t in rows)], 1)[1:]
            self.rows.append(type(rows)(*parts))

    def store(self, scheme: str, fill: float = 0.0):
        """A rollback store for all layers; the ring is wider than two windows."""
        ring = 1 << (2 * self.width).bit_length()
        return make_store(scheme, self.pools, self.width + 1, ring, fill)

    def verify(self, scheme: str, store, pools: Pools | None = None):
        pools = self.pools if pools is None else pools
        return verify(scheme, self.layers, self.rows, pools, self.slots, self.seq_lens, self.width, store)

    def steps(self) -> tuple[list[Pools], torch.Tensor]:
        """Pools after 0 .. W decode steps of the real requests, and their outputs [Lk, bs, W, H, V]."""
        pools, snapshots, outputs = self.pools.clone(), [self.pools.clone()], []
        for j in range(self.width):
            step = [rows.pick(torch.arange(self.bs) * self.width + j) for rows in self.rows]
            outputs.append(decode(self.layers, step, pools, self.slots[: self.bs]))
            snapshots.append(pools.clone())
        return snapshots, torch.stack(outputs, 2)


def close(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
    assert bool(actual.isfinite().all()) and error < bound, float(error)


@shapes
def test_verify_agrees_with_the_reference(heads, dim, width, bs):
    case = Round(heads, dim, width, bs)
    ring = case.store("replay")
    out = case.verify("replay", ring)
    for i, p in enumerate(case.layers):
        mine = case.store("replay")
        own = type(mine)(*(t[i] for t in mine))
        inputs = [t.contiguous() for t in case.rows[i]]
        want = reference.kda_verify_replay(
            *inputs, p, *case.pools.layer(i), case.slots, case.seq_lens, width, own
        )  # fmt: skip
        close(out[i].flatten(0, 1), want, 4e-3)
        for got, stored in zip(ring, own, strict=True):
            close(got[i, 1:], stored[1:], 4e-3 if stored.dtype == BF16 else 1e-6)
        assert equal_bits(ring.x[i, 1:], own.x[1:])


@shapes
@schemes
def test_a_window_is_that_many_decode_steps_and_every_accept_length_commits_them(scheme, heads, dim, width, bs):
    case = Round(heads, dim, width, bs)
    snapshots, plain = case.steps()
    store = case.store(scheme, float("nan"))
    before = case.pools.clone()
    assert equal_bits(case.verify(scheme, store)[:, :bs], plain)
    assert all(equal_bits(a, b) for a, b in zip(case.pools, before, strict=True))
    for first in range(width + 1):
        accept = torch.zeros_like(case.slots)
        accept[:bs] = (torch.arange(bs) + first) % (width + 1)
        got, want = case.pools.clone(), snapshots[0].clone()
        for slot, n in zip(case.slots[:bs].tolist(), accept.tolist(), strict=False):
            for pool, source in zip(want, snapshots[n], strict=True):
                pool[:, slot] = source[:, slot]
        commit(scheme, got, store, case.slots, case.seq_lens, accept, width)
        assert all(equal_bits(a[:, 1:], b[:, 1:]) for a, b in zip(got, want, strict=True))


@shapes
def test_decode_agrees_with_the_reference_and_keeps_its_counters_at_zero(heads, dim, width, bs):
    case = Round(heads, dim, 1, bs)
    mine, other = case.pools.clone(), case.pools.clone()
    for _ in range(3):
        out = decode(case.layers, case.rows, mine, case.slots)
        for i, p in enumerate(case.layers):
            inputs = [t.contiguous() for t in case.rows[i]]
            want = reference.kda_decode(*inputs, p, *other.layer(i), case.slots)
            close(out[i, :bs], want[:bs], 6e-3)
    close(mine.state[:, 1:], other.state[:, 1:], 4e-3)
    assert equal_bits(mine.conv[:, 1:], other.conv[:, 1:])
    assert not cuda._arrivals(mine.conv, 1).any()


@shapes
def test_a_request_alone_has_the_bits_it_has_in_a_batch(heads, dim, width, bs):
    case = Round(heads, dim, width, 3)
    out = case.verify("replay", case.store("replay"))
    for r in range(3):
        rows = [x.pick(slice(r * width, (r + 1) * width)) for x in case.rows]
        where = (case.slots[r : r + 1], case.seq_lens[r : r + 1])
        own = case.store("replay")
        alone = verify("replay", case.layers, rows, case.pools, *where, width, own)
        assert equal_bits(alone, out[:, r : r + 1])


@pytest.mark.parametrize("grid", [Grid(4, 2), Grid(8, 4), Grid(8, 12), Grid(16, 5), Grid(32, 8), Grid(32, 12)])
@pytest.mark.parametrize("pad", [8, 1], ids=["aligned", "unaligned"])
def test_bits_depend_neither_on_the_cut_nor_on_the_alignment(grid, pad):
    heads, dim, width, bs = SHAPES[0]
    torch.manual_seed(5)
    case = Round(heads, dim, width, bs, pad)
    stores, outputs = [], []
    for cut in (grid, None):
        store = case.store("replay")
        own = type(store)(*(t[0] for t in store))
        inputs = tuple(case.rows[0]) if cut else tuple(t.contiguous() for t in case.rows[0])
        pools = (*case.pools.layer(0), case.slots)
        kept = (*own, None, own.x.shape[1])
        outputs.append(chain(inputs, case.layers[0], pools, (case.seq_lens, width), REPLAY, kept, cut))
        stores.append(own)
    assert equal_bits(*outputs)
    assert all(equal_bits(a[1:], b[1:]) for a, b in zip(*stores, strict=True))


def test_what_the_kernels_refuse_is_named():
    pools = make_pools(1, 2, 1, 32, BF16)
    assert cuda.why_not(*pools) is None
    assert "bf16" in cuda.why_not(pools.conv.float(), pools.state)
    assert "head sizes" in cuda.why_not(pools.conv, torch.zeros(1, 2, 1, 48, 48))
    stage = make_store("staged", pools, 2)
    own, p, rows = type(stage)(*(t[0] for t in stage)), make_params(1, 32), make_rows(3, 1, 32, BF16)
    with pytest.raises(ValueError, match="cannot hold a window of 3"):
        cuda.kda_verify_staged(*rows, p, *pools.layer(0), torch.tensor([1]), 3, own)
