"""Draft-block attention: visibility by hand, groups, latent form, poison, and no host read."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgling_kernel.block_attention import block_attention
from sgling_kernel.cache_locs import context_locs
from sgling_kernel.mla import PagedContext
from sgling_kernel.rotary import apply_rope, apply_rope_neox, rope_table

LENGTHS, WIDTH, BOUND = [0, 7, 20], 4, 32


def paged(seed: int = 0):
    """(context, keys, values) of three requests over shuffled slots; unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(4, BOUND, dtype=torch.int64)
    table[1:] = (torch.randperm(3 * BOUND, generator=generator) + 1).view(3, BOUND)
    keys = torch.full((3 * BOUND + 1, 2, 8), torch.nan)
    values = torch.full((3 * BOUND + 1, 2, 6), torch.nan)
    for row, length in enumerate(LENGTHS, 1):
        used = table[row, : length + WIDTH]
        keys[used] = torch.randn(len(used), 2, 8, generator=generator)
        values[used] = torch.randn(len(used), 2, 6, generator=generator)
    return PagedContext(table, torch.arange(1, 4), torch.tensor(LENGTHS), WIDTH, BOUND), keys, values


def by_hand(q, keys, values, ctx, causal, window, scale):
    """One row and head at a time."""
    out = torch.empty(*q.shape[:2], values.shape[-1])
    for i in range(len(q)):
        request, j = divmod(i, WIDTH)
        own = LENGTHS[request] + j
        last = own if causal else LENGTHS[request] + WIDTH - 1
        first = 0 if window is None else max(0, own - window + 1)
        slots = ctx.req_to_token[request + 1, first : last + 1]
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // keys.shape[1])
            weight = (keys[slots, group] @ q[i, head] * scale).softmax(0)
            out[i, head] = weight @ values[slots, group]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("heads", [2, 6])
def test_rows_see_context_block_and_window(causal, window, heads):
    ctx, keys, values = paged()
    q = torch.randn(3 * WIDTH, heads, 8, generator=torch.Generator().manual_seed(1))
    out = block_attention(q, keys, values, ctx, causal, window, 0.3)
    torch.testing.assert_close(out, by_hand(q, keys, values, ctx, causal, window, 0.3), atol=1e-5, rtol=1e-5)


def test_bound_changes_nothing_beyond_rounding():
    ctx, keys, values = paged()
    q = torch.randn(3 * WIDTH, 4, 8)
    wide, narrow = (block_attention(q, keys, values, ctx._replace(kv_bound=b), False, None, 0.3) for b in (BOUND, 24))
    torch.testing.assert_close(wide, narrow)


def test_latent_form_is_one_key_head_whose_value_is_part_of_its_key():
    ctx, keys, _ = paged()
    pool = keys.flatten(1)[:, None]
    q = torch.randn(3 * WIDTH, 3, 16)
    out = block_attention(q, pool, pool[..., :10], ctx, False, None, 0.25)
    torch.testing.assert_close(out, by_hand(q, pool, pool[..., :10], ctx, False, None, 0.25), atol=1e-5, rtol=1e-5)


def test_no_host_read():
    with FakeTensorMode():
        index = torch.zeros(2, dtype=torch.int64)
        ctx = PagedContext(torch.zeros(3, 32, dtype=torch.int64), index, index, 4, 32)
        keys = torch.zeros(9, 2, 8)
        out = block_attention(torch.zeros(8, 4, 8), keys, keys, ctx, True, 5, 0.3)
        slots = context_locs(torch.zeros(3, 8, dtype=torch.int64), index, torch.zeros(3, dtype=torch.int32), 7)
    assert out.shape == (8, 4, 8) and slots.shape == (7,)


def test_context_slots_lie_one_request_after_the_other():
    table = torch.arange(40).view(4, 10)
    slots = context_locs(table, torch.tensor([3, 1]), torch.tensor([0, 4, 6], dtype=torch.int32), 6)
    assert slots.tolist() == [30, 31, 32, 33, 10, 11] and slots.dtype == torch.int32


def test_half_split_rope_is_the_interleaved_one_on_reordered_dimensions():
    x = torch.randn(6, 3, 16)
    positions, table = torch.arange(6) * 11, rope_table(128, 16, 10000.0)
    pairs = torch.arange(16).view(2, 8).T.flatten()  # (i, i + 8) side by side
    expected = torch.empty_like(x)
    expected[..., pairs] = apply_rope(x[..., pairs], positions, table)
    torch.testing.assert_close(apply_rope_neox(x, positions, table), expected)
