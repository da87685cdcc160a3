"""The Triton kernels of prompts against plain torch: fp32 in the interpreter without a GPU, fp32 and bf16 on one."""

from __future__ import annotations

import pytest
import torch

from ops.kda_case import make_params, make_pools, make_rows
from ops.test_triton_kernels import DEVICE, close, dtypes, strided
from sgling_kernel.kda import cpu, prefill_kernel, reference
from sgling_kernel.kda.recurrence import gates, l2_normalize, short_conv
from sgling_kernel.moe import by_expert, kernel


@pytest.fixture(autouse=True)
def _device():
    """Every tensor of a test lies on the device under test."""
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device("cpu")


@pytest.mark.parametrize(
    ("rows", "top", "experts"),
    [(1, 1, 3), (5, 8, 16), (33, 4, 24), (200, 8, 256), (1030, 8, 32)],
    ids=str,
)
@pytest.mark.parametrize("skewed", [False, True])
def test_places_are_those_of_a_stable_sort(rows, top, experts, skewed, monkeypatch):
    monkeypatch.setattr(by_expert, "BLOCKS", 20)  # several steps a program and a last program that is not full
    ids = torch.randint(0, 2 if skewed else experts, (rows, top)) + (experts - 2 if skewed else 0)
    place, ends = by_expert.places(ids, experts)
    order = ids.flatten().argsort(stable=True)
    assert place.flatten()[order].tolist() == list(range(rows * top))
    assert ends.dtype == torch.int32 and ends.tolist() == ids.flatten().bincount(minlength=experts).cumsum(0).tolist()


@dtypes
def test_rows_lie_at_the_places_of_their_pairs(dtype):
    x, place = strided(50, 1100, dtype), torch.randperm(150).view(50, 3)
    out = by_expert.spread_rows(x, place)
    assert torch.equal(out[place], x[:, None].expand(-1, 3, -1))


@dtypes
def test_combine_adds_the_shared_expert_to_the_rounded_sum(dtype):
    down, weights, place = torch.randn(15, 72).to(dtype), torch.rand(5, 3), torch.randperm(15).view(5, 3)
    routed = (down[place].float() * weights[..., None]).sum(1)
    close(kernel.combine(down, place, weights, None, dtype), routed, dtype)
    beside = torch.randn(5, 72).to(dtype)
    got = kernel.combine(down, place, weights, beside, dtype)
    assert torch.equal(got, kernel.combine(down, place, weights, None, dtype) + beside)


def one_request(dtype, tokens, heads=3, dim=24):
    """(params, projected rows as parts of a fused product, pools of four slots, slot)."""
    rows = make_rows(tokens, heads, dim, dtype)
    fused = torch.cat(rows, dim=1).split([part.shape[1] for part in rows], dim=1)
    return make_params(heads, dim), type(rows)(*fused), make_pools(1, 4, heads, dim, dtype), torch.tensor([2])


@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 7, 70])
def test_inputs_of_the_chunk_form(dtype, tokens):
    p, rows, pools, slot = one_request(dtype, tokens)
    heads, dim = p.dt_bias.shape
    got = prefill_kernel.chunk_inputs(*rows, p, pools.conv[0], slot, summed=False)
    assert all(part.is_contiguous() and part.shape[:3] == (1, tokens, heads) for part in got)
    whole = torch.cat((pools.conv[0, 2], rows.qkv))[None]
    q, k, v = short_conv(whole, p.conv_weight, torch.float32).to(dtype).view(1, tokens, 3, heads, dim).unbind(2)
    for actual, expected in zip(got[:2], (q, k), strict=True):
        assert actual.dtype == dtype
        close(actual, l2_normalize(expected.float()), dtype)
    close(got.v, v, dtype)
    g, beta = gates(rows.f, rows.b, p, torch.float32)
    close(got.g[0].flatten(1), g, torch.float32)
    close(got.beta[0], beta, torch.float32)
    chunks = g.split(prefill_kernel.CHUNK)
    sums = torch.cat([part.cumsum(0) for part in chunks]) * prefill_kernel.RCP_LN2
    summed = prefill_kernel.chunk_inputs(*rows, p, pools.conv[0], slot, summed=True)
    close(summed.g[0].flatten(1), sums, torch.float32)


@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_hand_over_moves_window_and_state_of_one_slot(dtype, tokens):
    _, rows, pools, slot = one_request(dtype, tokens)
    state, before = torch.randn_like(pools.state[0, 0]), pools.clone()
    prefill_kernel.hand_over(rows.qkv, state, *pools.layer(0), slot)
    assert torch.equal(pools.conv[0, 2], torch.cat((before.conv[0, 2], rows.qkv))[-3:])
    assert torch.equal(pools.state[0, 2], state)
    for after, untouched in zip(pools, before, strict=True):
        assert torch.equal(after[0, [0, 1, 3]], untouched[0, [0, 1, 3]])


def test_a_prompt_in_two_chunks_moves_its_slot_as_the_recurrence_does():
    p, rows, pools, slot = one_request(torch.float32, 70)
    mine, stepped = pools.clone(), pools.clone()
    parts = [
        reference.kda_extend(*rows.pick(part), p, *mine.layer(0), slot, prefill=cpu.kda_prefill)
        for part in (slice(0, 50), slice(50, 70))
    ]
    want = reference.kda_extend(*rows, p, *stepped.layer(0), slot)
    close(torch.cat(parts), want, torch.float32)
    for a, b in zip(mine, stepped, strict=True):
        close(a, b, torch.float32)
