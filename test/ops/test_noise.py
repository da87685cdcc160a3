"""Noise: exact slices, open interval, uniformity, independence of seed and position, no neighbours."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgling_kernel.noise import gumbel_noise, uniform_noise

V = 6144
M32, M64, GOLDEN = 2**32 - 1, 2**64 - 1, 0x9E3779B97F4A7C15


def row(seed, position, start=0, size=V, op=uniform_noise):
    return op(torch.tensor([seed]), torch.tensor([position]), start, size)[0]


@pytest.mark.parametrize("start,size", [(0, 3072), (3072, 3072), (1, 1), (6143, 1), (1537, 4000), (7, 13)])
def test_shard_is_exact_slice(start, size):
    seed, position = torch.tensor([3, -(2**62), 0]), torch.tensor([0, 9, 2**40])
    full = gumbel_noise(seed, position, 0, V)
    assert torch.equal(gumbel_noise(seed, position, start, size), full[:, start : start + size])


def test_row_does_not_depend_on_batch():
    seed, position = torch.arange(7) * 99991, torch.arange(7) * 31
    full = gumbel_noise(seed, position, 0, 1001)
    for i in range(7):
        assert torch.equal(gumbel_noise(seed[i : i + 1], position[i : i + 1], 0, 1001)[0], full[i])


def python_bits(seed, position, token):
    """The hash in Python's unbounded integers: SplitMix64 row key, lowbias32 rounds per token."""

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
        return x ^ (x >> 31)

    key = mix((mix((seed + GOLDEN) & M64) + position * GOLDEN) & M64)
    x = token ^ (key & M32)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = (x + (key >> 32)) & M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed,position", [(42, 7), (-1, 123456), (2**63 - 1, 0), (-(2**63), 131071)])
def test_hash_equals_python_integers(seed, position):
    """The hash is part of the seed contract: text for a seed must not change between versions or devices."""
    bits = np.array([python_bits(seed, position, token) & 0x7FFFFFFF for token in range(157000, 157184)])
    expected = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    assert row(seed, position, 157000, 184).tolist() == expected.tolist()


def test_first_draws_are_pinned():
    assert [python_bits(42, 7, token) & 0x7FFFFFFF for token in (1000, 1001)] == [70482588, 973103139]


def test_open_interval_and_finite():
    u = uniform_noise(torch.arange(64), torch.arange(64), 0, 157184)
    assert u.min().item() > 0.0 and u.max().item() < 1.0
    g = gumbel_noise(torch.arange(64), torch.arange(64), 0, 157184)
    assert torch.isfinite(g).all() and g.min() > -3 and g.max() < 22.3


def chi_square(samples, bins):
    counts = torch.histc(samples.float(), bins=bins, min=0.0, max=1.0)
    expected = samples.numel() / bins
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_uniform_along_every_axis(axis):
    n, bins = 60000, 100
    count = torch.arange(n)
    if axis == "token":
        u = row(11, 5, 0, n)
    elif axis == "position":
        u = uniform_noise(torch.full((n,), 11), count, 77, 1)[:, 0]
    else:
        u = uniform_noise(count, torch.full((n,), 5), 77, 1)[:, 0]
    assert chi_square(u, bins) < 99 + 5 * (2 * 99) ** 0.5


def test_gumbel_moments():
    g = gumbel_noise(torch.arange(8), torch.arange(8) + 50, 0, 40000).double()
    assert abs(g.mean().item() - 0.5772) < 0.01 and abs(g.var().item() - 1.6449) < 0.03


@pytest.mark.parametrize("other", [(1, 8), (2, 7), (2, 8), (1 << 32, 7), (-1, 7), (1, 7 + (1 << 32)), (7, 1)])
def test_rows_are_decorrelated(other):
    a, b = row(1, 7, 0, 40000) - 0.5, row(*other, 0, 40000) - 0.5
    for shift in (0, 1, 17):
        x, y = a[shift:], b[: 40000 - shift]
        assert abs((x * y).mean().item() * 12) < 0.025  # 5 sigma of 1/sqrt(n)
    assert (a == b).float().mean() < 1e-3


def test_tail_resolution():
    """Draws far below 2^-24 exist, so unlikely tokens keep their probability."""
    u = uniform_noise(torch.arange(40), torch.zeros(40, dtype=torch.int64), 0, 157184)
    expected = u.numel() * 2.0**-20
    assert abs((u < 2.0**-20).sum().item() - expected) < 5 * expected**0.5 + 1


def test_no_host_read():
    with FakeTensorMode():
        out = gumbel_noise(torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64), 16, V)
    assert out.shape == (4, V) and out.dtype == torch.float32
