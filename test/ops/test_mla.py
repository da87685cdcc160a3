"""Latent attention: expanded prefill, absorbed paged decode, isolation of unseen cache rows."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sgling_kernel import mla
from sgling_kernel.linear import fixed_rows
from sgling_kernel.mla import PagedContext, cpu, reference

H, NOPE, ROPE, V, LATENT = 4, 24, 16, 32, 48
SCALE = (NOPE + ROPE) ** -0.5
SEQ_LENS = [3, 253, 700]
MAX_LEN = 4200


class Cache:
    """A paged cache of three requests with shuffled slots; everything that no row sees is NaN."""

    def __init__(self, seq_lens: list[int], width: int, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(11)
        used = [length + width for length in seq_lens]
        self.slots = torch.randperm(sum(used) + 50, generator=generator) + 1
        self.pool = torch.full((self.slots.numel() + 1, LATENT + ROPE), math.nan, dtype=dtype)
        self.pool[self.slots[: sum(used)]] = torch.randn(sum(used), LATENT + ROPE, generator=generator).to(dtype)
        stale = self.slots[sum(used)].item()
        self.req_to_token = torch.full((len(seq_lens) + 1, MAX_LEN), stale)
        for row, (start, count) in enumerate(zip([sum(used[:i]) for i in range(len(used))], used, strict=True), 1):
            self.req_to_token[row, :count] = self.slots[start : start + count]
        self.seq_lens, self.width = torch.tensor(seq_lens), width

    def context(self, kv_bound: int | None = None) -> PagedContext:
        rows = torch.arange(1, self.req_to_token.shape[0])
        bound = int(self.seq_lens.max()) + self.width if kv_bound is None else kv_bound
        return PagedContext(self.req_to_token, rows, self.seq_lens, self.width, bound)


def _queries(rows: int, dtype: torch.dtype = torch.float32, heads: int = H) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    q = torch.randn(rows, heads, LATENT + ROPE, generator=generator).to(dtype)
    return q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous()


def _expansion() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(13)
    w_kc = torch.randn(H, NOPE, LATENT, generator=generator) / LATENT**0.5
    return w_kc, torch.randn(H, LATENT, V, generator=generator) / LATENT**0.5


def _decode_oracle(q_lat, q_pe, cache: Cache) -> torch.Tensor:
    """Row by row and head by head in fp64 over the visible rows alone."""
    query, out = torch.cat((q_lat, q_pe), -1).double(), []
    for n in range(query.shape[0]):
        request, j = divmod(n, cache.width)
        seen = cache.req_to_token[request + 1, : SEQ_LENS[request] + j + 1]
        kv = cache.pool[seen].double()
        out.append((query[n] @ kv.T * SCALE).softmax(-1) @ kv[:, :LATENT])
    return torch.stack(out)


@pytest.mark.parametrize("decode", [cpu.mla_decode, reference.mla_decode])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("block", [None, 8])
def test_decode_equals_attention_over_the_visible_rows_alone(decode, width, block):
    cache, (q_lat, q_pe) = Cache(SEQ_LENS, width), _queries(len(SEQ_LENS) * width)
    with fixed_rows(block):
        out = decode(q_lat, q_pe, cache.pool, cache.context(), SCALE)
    torch.testing.assert_close(out.double(), _decode_oracle(q_lat, q_pe, cache), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize(("width", "heads"), [(1, 1), (1, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("seq_lens", [SEQ_LENS, [60], [1600]])
def test_decode_bits_do_not_depend_on_kv_bound(block, width, heads, seq_lens):
    cache, (q_lat, q_pe) = Cache(seq_lens, width), _queries(len(seq_lens) * width, heads=heads)
    with fixed_rows(block):
        tight = mla.mla_decode(q_lat, q_pe, cache.pool, cache.context(), SCALE)
        for slack in (1, 63, 256, 700, 1900, 20000):
            loose = cache.context(max(seq_lens) + width + slack)
            assert torch.equal(mla.mla_decode(q_lat, q_pe, cache.pool, loose, SCALE), tight)
    assert tight.isfinite().all()


def test_decode_of_many_requests_in_several_passes_gives_the_same_bits(monkeypatch):
    cache, (q_lat, q_pe) = Cache(SEQ_LENS, 4), _queries(12)
    together = mla.mla_decode(q_lat, q_pe, cache.pool, cache.context(), SCALE)
    monkeypatch.setattr(cpu, "_POSITIONS_AT_ONCE", 1)
    assert torch.equal(mla.mla_decode(q_lat, q_pe, cache.pool, cache.context(), SCALE), together)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_decode_rows_ignore_the_later_rows_of_their_window(garbage):
    cache, (q_lat, q_pe) = Cache(SEQ_LENS, 4), _queries(12)
    clean = mla.mla_decode(q_lat, q_pe, cache.pool, cache.context(), SCALE).unflatten(0, (3, 4))
    for row, length in enumerate(SEQ_LENS, 1):
        cache.pool[cache.req_to_token[row, length + 2 : length + 4]] = garbage
    dirty = mla.mla_decode(q_lat, q_pe, cache.pool, cache.context(), SCALE).unflatten(0, (3, 4))
    assert torch.equal(dirty[:, :2], clean[:, :2])


def test_decode_does_not_hide_a_nan_that_a_row_sees():
    cache, (q_lat, q_pe) = Cache(SEQ_LENS, 4), _queries(12)
    cache.pool[cache.req_to_token[2, 5], 3] = math.nan
    out = mla.mla_decode(q_lat, q_pe, cache.pool, cache.context(), SCALE).unflatten(0, (3, 4))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("heads", [1, 4])
def test_fixed_rows_make_a_verify_row_equal_the_plain_decode_of_its_position_bit_by_bit(heads):
    cache, (q_lat, q_pe) = Cache(SEQ_LENS, 4), _queries(12, heads=heads)
    ctx = cache.context()
    with fixed_rows(8):
        verify = mla.mla_decode(q_lat, q_pe, cache.pool, ctx, SCALE)
        for n in range(12):
            request, j = divmod(n, 4)
            one = slice(request, request + 1)
            plain = PagedContext(ctx.req_to_token, ctx.req_pool_indices[one], ctx.seq_lens[one] + j, 1, 720)
            alone = mla.mla_decode(q_lat[n : n + 1].clone(), q_pe[n : n + 1].clone(), cache.pool, plain, SCALE)
            assert torch.equal(alone[0], verify[n])


def test_padded_request_in_dummy_row_zero_stays_finite_and_disturbs_nobody():
    cache, (q_lat, q_pe) = Cache(SEQ_LENS, 4), _queries(16)
    ctx = cache.context()
    live = mla.mla_decode(q_lat[:12], q_pe[:12], cache.pool, ctx, SCALE)
    cache.req_to_token[0] = 0
    cache.pool[0] = 1.0
    zero = torch.zeros(1, dtype=torch.int64)
    rows, lens = torch.cat((ctx.req_pool_indices, zero)), torch.cat((ctx.seq_lens, zero))
    padded = mla.mla_decode(q_lat, q_pe, cache.pool, PagedContext(ctx.req_to_token, rows, lens, 4, 800), SCALE)
    assert padded.isfinite().all() and torch.equal(padded[:12], live)


def test_bf16_decode_accumulates_in_fp32_and_rounds_once():
    cache, (q_lat, q_pe) = Cache(SEQ_LENS, 4, torch.bfloat16), _queries(12, torch.bfloat16)
    out = mla.mla_decode(q_lat, q_pe, cache.pool, cache.context(), SCALE)
    wide = mla.mla_decode(q_lat.float(), q_pe.float(), cache.pool.float(), cache.context(), SCALE)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())


@pytest.mark.parametrize("prefill", [cpu.mla_prefill, reference.mla_prefill])
@pytest.mark.parametrize(("rows", "prefix_len"), [(1, 0), (1, 300), (70, 0), (256, 1), (300, 513)])
def test_prefill_equals_absorbed_decode_of_the_same_rows(prefill, rows, prefix_len):
    generator = torch.Generator().manual_seed(rows)
    w_kc, w_vc = _expansion()
    kv = torch.randn(prefix_len + rows, LATENT + ROPE, generator=generator)
    q = torch.randn(rows, H, NOPE + ROPE, generator=generator)
    out = prefill(q, kv, w_kc, w_vc, prefix_len, SCALE)
    one = torch.zeros(1, dtype=torch.int64)
    ctx = PagedContext(torch.arange(len(kv))[None], one, one + prefix_len, rows, len(kv))
    latent = reference.mla_decode(mla.absorb_q(q[..., :NOPE], w_kc), q[..., NOPE:], kv, ctx, SCALE)
    torch.testing.assert_close(out, mla.expand_v(latent, w_vc), atol=2e-5, rtol=1e-4)


def test_prefill_in_chunks_agrees_with_prefill_at_once():
    generator = torch.Generator().manual_seed(3)
    w_kc, w_vc = _expansion()
    kv, q = (torch.randn(400, *s, generator=generator) for s in ((LATENT + ROPE,), (H, NOPE + ROPE)))
    whole = mla.mla_prefill(q, kv, w_kc, w_vc, 0, SCALE)
    parts = [mla.mla_prefill(q[s:e], kv[:e], w_kc, w_vc, s, SCALE) for s, e in ((0, 128), (128, 300), (300, 400))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-4)


def test_prefill_takes_values_wider_than_keys_and_bf16():
    generator = torch.Generator().manual_seed(4)
    w_kc, w_vc = torch.randn(H, 8, 16, generator=generator), torch.randn(H, 16, 64, generator=generator)
    kv, q = torch.randn(50, 24, generator=generator), torch.randn(40, H, 16, generator=generator)
    arguments = (q, kv, w_kc, w_vc)
    expected = reference.mla_prefill(*arguments, 10, 0.05)
    torch.testing.assert_close(mla.mla_prefill(*arguments, 10, 0.05), expected, atol=1e-4, rtol=1e-4)
    half = mla.mla_prefill(*(t.bfloat16() for t in arguments), 10, 0.05)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.1, rtol=0.05)


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = out if isinstance(out, tuple | list) else (out,)
        fresh = [t for t in tensors if isinstance(t, torch.Tensor) and not t._is_view()]
        self.elements = max([self.elements, *(t.untyped_storage().nbytes() // t.element_size() for t in fresh)])
        return out


def test_prefill_memory_grows_with_the_length_not_with_its_square():
    tokens, prefix_len = 4096, 12288
    with FakeTensorMode(), LargestTensor() as largest:
        q, kv = torch.zeros(tokens, H, NOPE + ROPE), torch.zeros(prefix_len + tokens, LATENT + ROPE)
        w_kc, w_vc = torch.zeros(H, NOPE, LATENT), torch.zeros(H, LATENT, V)
        mla.mla_prefill(q, kv, w_kc, w_vc, prefix_len, SCALE)
    assert largest.elements <= (prefix_len + tokens) * max(256, H * (NOPE + ROPE))


def test_decode_memory_does_not_grow_with_the_batch():
    bs, length = 16, 16384
    with FakeTensorMode(), LargestTensor() as largest:
        index = torch.zeros(bs, dtype=torch.int64)
        ctx = PagedContext(torch.zeros(2, length, dtype=torch.int64), index, index, 4, length)
        q_lat, q_pe = torch.zeros(bs * 4, H, LATENT), torch.zeros(bs * 4, H, ROPE)
        mla.mla_decode(q_lat, q_pe, torch.zeros(99, LATENT + ROPE), ctx, SCALE)
    assert largest.elements <= length * (LATENT + ROPE)


def test_write_kv_stores_latent_first_and_touches_no_other_slot():
    pool, loc = torch.zeros(6, LATENT + ROPE), torch.tensor([4, 2, 0, 0])
    c, k_pe = torch.randn(4, LATENT), torch.randn(4, ROPE)
    mla.write_kv(pool, loc, c, k_pe)
    assert torch.equal(pool[[4, 2]], torch.cat((c, k_pe), -1)[:2])
    assert not pool[[1, 3, 5]].any()


def test_absorbed_projections_are_per_head_products():
    w_kc, w_vc = _expansion()
    q, latent = torch.randn(5, H, NOPE), torch.randn(5, H, LATENT)
    torch.testing.assert_close(mla.absorb_q(q, w_kc), torch.einsum("nhi,hil->nhl", q, w_kc), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mla.expand_v(latent, w_vc), torch.einsum("nhl,hlv->nhv", latent, w_vc))


def test_fixed_rows_make_projections_independent_of_neighbours():
    generator = torch.Generator().manual_seed(9)
    w_kc, w_vc = _expansion()
    q, latent = torch.randn(13, H, NOPE, generator=generator), torch.randn(13, H, LATENT, generator=generator)
    with fixed_rows(4):
        absorbed, expanded = mla.absorb_q(q, w_kc), mla.expand_v(latent, w_vc)
        for n in range(13):
            assert torch.equal(mla.absorb_q(q[n : n + 1].clone(), w_kc)[0], absorbed[n])
            assert torch.equal(mla.expand_v(latent[n : n + 1].clone(), w_vc)[0], expanded[n])


def test_head_gate_rounds_the_gate_then_the_product():
    o, logits = torch.randn(3, H, V).bfloat16(), torch.randn(3, H).bfloat16()
    gate = (1 / (1 + torch.exp(-logits.float()))).bfloat16()
    out = mla.head_gate(o, logits)
    assert torch.equal(out, (o.float() * gate.float()[..., None]).bfloat16().flatten(1))


def test_head_gate_gives_a_row_the_same_bits_alone_and_in_a_batch():
    generator = torch.Generator().manual_seed(6)
    o, logits = torch.randn(9, H, V, generator=generator), torch.randn(9, H, generator=generator)
    together = mla.head_gate(o, logits)
    assert all(torch.equal(mla.head_gate(o[n : n + 1], logits[n : n + 1].clone())[0], together[n]) for n in range(9))


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("decode", [cpu.mla_decode, reference.mla_decode, mla.mla_decode])
def test_decode_operators_read_no_device_value_on_the_host(block, decode):
    with fixed_rows(block), FakeTensorMode():
        index = torch.zeros(2, dtype=torch.int64)
        ctx = PagedContext(torch.zeros(3, 600, dtype=torch.int64), index, index, 3, 300)
        pool, q = torch.zeros(9, LATENT + ROPE), torch.zeros(6, H, NOPE)
        mla.write_kv(pool, torch.zeros(6, dtype=torch.int64), torch.zeros(6, LATENT), torch.zeros(6, ROPE))
        q_lat = mla.absorb_q(q, torch.zeros(H, NOPE, LATENT))
        out = decode(q_lat, torch.zeros(6, H, ROPE), pool, ctx, SCALE)
        gated = mla.head_gate(mla.expand_v(out, torch.zeros(H, LATENT, V)), torch.zeros(6, H))
    assert out.shape == (6, H, LATENT) and gated.shape == (6, H * V)
