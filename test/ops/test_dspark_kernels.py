"""The drafter's kernels against their references: fp32 in the interpreter without a GPU, fp32 and bf16 on one."""

from __future__ import annotations

import pytest
import torch

from sgling_kernel import cuda
from sgling_kernel.block_attention import RowRotary, prepare_kernel
from sgling_kernel.block_attention import kernel as block_kernel
from sgling_kernel.block_attention import reference as block_reference
from sgling_kernel.cache_locs import kernel as locs_kernel
from sgling_kernel.cache_locs import reference as locs_reference
from sgling_kernel.confidence import kernel as confidence_kernel
from sgling_kernel.confidence import reference as confidence_reference
from sgling_kernel.markov import DraftNoise
from sgling_kernel.markov import cuda as markov_cuda
from sgling_kernel.markov import kernel as markov_kernel
from sgling_kernel.markov import reference as markov_reference
from sgling_kernel.mla import PagedContext
from sgling_kernel.rotary import rope_table

GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LENGTHS, WIDTH = [0, 7, 150], 5


@pytest.fixture(autouse=True)
def _device():
    """Every tensor of a test lies on the device under test."""
    torch.set_default_device("cuda" if GPU else "cpu")
    yield
    torch.set_default_device("cpu")


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    bound = 2e-5 if dtype == torch.float32 else 1e-2
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
    assert actual.shape == expected.shape and bool(actual.isfinite().all())
    assert error < bound, float(error)


def paged(dtype, kv_heads: int, dim: int, width: int = WIDTH, columns: int = 192):
    """(context, cache [slots, 2, KVH, D]) of three requests over shuffled slots; slots nobody uses hold NaN."""
    table = torch.zeros(4, columns, dtype=torch.int64)
    table[1:] = (torch.randperm(3 * columns) + 1).view(3, columns)
    cache = torch.full((3 * columns + 1, 2, kv_heads, dim), torch.nan, dtype=dtype)
    for row, length in enumerate(LENGTHS, 1):
        cache[table[row, : length + width]] = torch.randn(length + width, 2, kv_heads, dim).to(dtype)
    return PagedContext(table, torch.arange(1, 4), torch.tensor(LENGTHS), width, columns), cache


@dtypes
@pytest.mark.parametrize("heads", [2, 6, 16])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 9), (True, 1), (True, 70)])
def test_block_attention(dtype, heads, causal, window):
    ctx, cache = paged(dtype, 2, 24)
    q = torch.randn(3 * WIDTH, heads, 24).to(dtype)
    args = (q, *cache.unbind(1), ctx, causal, window, 0.3)
    assert block_kernel.why_not_paged(*args[:3]) is None
    close(block_kernel.block_attention(*args), block_reference.block_attention(*args), dtype)


@dtypes
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 40)])
def test_latent_block_attention(dtype, causal, window):
    ctx, cache = paged(dtype, 1, 20)
    pool = cache.flatten(1)[:, None]
    args = (torch.randn(3 * WIDTH, 4, 40).to(dtype), pool, pool[..., :28], ctx, causal, window, 0.25)
    close(block_kernel.block_attention(*args), block_reference.block_attention(*args), dtype)


@dtypes
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("window", [None, 33])
def test_a_blocks_bits_depend_neither_on_the_bound_nor_on_neighbours(dtype, latent, window):
    ctx, cache = paged(dtype, 1 if latent else 2, 24)
    keys, values = cache.unbind(1)
    if latent:
        keys = cache.flatten(1)[:, None]
        values = keys[..., :32]
    q = torch.randn(3 * WIDTH, 4, keys.shape[-1]).to(dtype)
    together = block_kernel.block_attention(q, keys, values, ctx, False, window, 0.3)
    wider = PagedContext(torch.cat((ctx.req_to_token, ctx.req_to_token), 1), *ctx[1:4], 384)
    assert torch.equal(block_kernel.block_attention(q, keys, values, wider, False, window, 0.3), together)
    for i in range(3):
        one = PagedContext(ctx.req_to_token, ctx.req_pool_indices[i, None], ctx.seq_lens[i, None], WIDTH, 192)
        rows = slice(i * WIDTH, (i + 1) * WIDTH)
        alone = block_kernel.block_attention(q[rows], keys, values, one, False, window, 0.3)
        assert torch.equal(alone, together[rows])


@dtypes
def test_a_rows_bits_do_not_depend_on_the_width_of_a_causal_block(dtype):
    ctx, cache = paged(dtype, 2, 24)
    q = torch.randn(3, WIDTH, 6, 24).to(dtype)
    whole = block_kernel.block_attention(q.flatten(0, 1), *cache.unbind(1), ctx, True, None, 0.3)
    for width in (1, 3):
        part = q[:, :width].flatten(0, 1)
        narrow = block_kernel.block_attention(part, *cache.unbind(1), ctx._replace(width=width), True, None, 0.3)
        assert torch.equal(narrow.view(3, width, -1), whole.view(3, WIDTH, -1)[:, :width])


def test_what_the_block_kernel_refuses():
    _, cache = paged(torch.float32, 2, 24)
    keys, values = cache.unbind(1)
    q = torch.randn(5, 4, 24)
    assert "contiguous" in block_kernel.why_not_paged(q.transpose(1, 2), keys, values)
    assert "single key head" in block_kernel.why_not_paged(q, keys, keys[..., :8])


@dtypes
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("heads", "layers"), [(4, 1), (0, 3)], ids=["block rows", "features"])
@pytest.mark.parametrize("dim", [16, 8])
def test_prepare_heads(dtype, neox, heads, layers, dim):
    x = torch.randn(5, layers, (heads + 4) * 16 + 3).to(dtype)[..., 3:]
    rotary = RowRotary(torch.arange(5) * 3, rope_table(64, dim, 1e4, x.device), neox)
    norms = (torch.randn(16).to(dtype), torch.randn(layers, 16).to(dtype), 1e-6)
    loc, caches = torch.tensor([3, 5, 7, 1, 9]), torch.zeros(2, layers, 12, 64, dtype=dtype)
    got = prepare_kernel.prepare_heads(x, norms, rotary, (caches[0], loc))
    want = block_reference.prepare_heads(x, norms, rotary, (caches[1], loc))
    close(caches[0], caches[1], dtype)
    assert got.shape == (5, heads * layers, 16)
    close(got, want, dtype)


@dtypes
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("heads", "layers"), [(3, 1), (0, 4)], ids=["block rows", "features"])
def test_prepare_latent(dtype, neox, heads, layers):
    pe, latent = torch.randn(5, layers, heads + 1, 8).to(dtype), torch.randn(5, layers, 27).to(dtype)[..., 3:]
    rotary = RowRotary(torch.arange(5) * 3, rope_table(64, 8, 1e4, pe.device), neox)
    norm, loc = (torch.randn(layers, 24).to(dtype), 1e-6), torch.tensor([3, 5, 7, 1, 9])
    caches = torch.zeros(2, layers, 12, 32, dtype=dtype)
    got = prepare_kernel.prepare_latent(pe, latent, norm, rotary, (caches[0], loc))
    want = block_reference.prepare_latent(pe, latent, norm, rotary, (caches[1], loc))
    close(caches[0], caches[1], dtype)
    assert got.shape == (5, heads * layers, 8)
    close(got, want, dtype)


def chains(bs: int, drafts: int, vocab: int, rank: int, dtype, sampled: bool):
    """(arguments of both forms without the output, empty outputs with strided rows)."""
    base = torch.randn(bs, drafts, vocab)
    w1, w2 = torch.randn(vocab, rank).to(dtype), (torch.randn(vocab, rank) / 2).to(dtype)
    heat = torch.tensor([0.0, 0.9, 0.0, 1.3, 0.5, 2.0, 0.0, 1.0, 1.0])
    noise = DraftNoise(heat, torch.arange(9) * 7919, torch.arange(bs) + 1, torch.arange(bs) * 5) if sampled else None
    outs = torch.zeros(2, bs, drafts + 1, dtype=torch.int64)[..., :drafts]
    return (base, w1, w2, torch.randint(0, vocab, (bs,)), noise), outs


@dtypes
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("shape", [(1, 5, 300, 16), (3, 4, 301, 8), (2, 1, 64, 32), (8, 2, 100, 12)])
def test_markov_chain(dtype, sampled, shape, monkeypatch):
    monkeypatch.setattr(markov_kernel, "TILE_VALUES", 512)  # several vocabulary blocks
    args, (got, want) = chains(*shape, dtype, sampled)
    assert markov_kernel.why_not_chain(*args[:3]) is None
    markov_kernel.markov_chain(*args, got)
    markov_reference.markov_chain(*args, want)
    assert torch.equal(got, want)


@pytest.fixture
def cuda_chain():
    """The CUDA form: on a GPU one node for the whole block, without one the emulation, a call per draft."""
    if GPU:
        if (reason := cuda.why_not()) is not None:
            pytest.skip(reason)
        yield markov_cuda
        return
    with cuda.emulation():
        if (reason := cuda.why_not()) is not None:
            pytest.skip(reason)
        yield markov_cuda


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 5, 300, 32), (3, 4, 301, 64), (8, 2, 100, 256), (2, 16, 1000, 32), (1, 3, 700, 512)]
)
def test_markov_chain_in_cuda(cuda_chain, sampled, shape):
    """Again and again over the same words: no chain takes those of the one before for its own."""
    for _ in range(2):
        args, (got, want) = chains(*shape, torch.bfloat16, sampled)
        assert cuda_chain.why_not_chain(*args[:3]) is None
        cuda_chain.markov_chain(*args, got)
        markov_reference.markov_chain(*args, want)
        assert torch.equal(got, want)


@pytest.mark.skipif(not GPU, reason="needs a GPU: CTAs that wait for each other")
def test_the_chain_at_a_ranks_shape_in_a_graph(cuda_chain):
    """39,296 tokens of rank 256 in shared memory, 157,184 streamed; replays draw what their operands say now."""
    for vocab in (39296, 157184):
        args, (got, want) = chains(1, 16, vocab, 256, torch.bfloat16, True)
        cuda_chain.markov_chain(*args, got)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cuda_chain.markov_chain(*args, got)
        for _ in range(20):
            args[0].normal_()
            graph.replay()
            markov_reference.markov_chain(*args, want)
            agreeing = (got == want).cumprod(-1).sum()  # a near tie may part the two, and then all drafts behind it
            assert agreeing >= 8


@pytest.mark.parametrize("form", ["triton", "cuda"])
def test_markov_chain_takes_the_lowest_of_equals_and_never_nan(form, cuda_chain, monkeypatch):
    monkeypatch.setattr(markov_kernel, "TILE_VALUES", 512)
    chain, dtype = (markov_kernel, torch.float32) if form == "triton" else (cuda_chain, torch.bfloat16)
    base, zeros = torch.zeros(1, 3, 300), torch.zeros(300, 32, dtype=dtype)
    base[0, 0, [250, 40, 41]] = 3.0
    base[0, 1, 7] = torch.nan
    base[0, 2] = -torch.inf
    out = torch.full((1, 3), -1, dtype=torch.int64)
    chain.markov_chain(base, zeros, zeros, torch.tensor([5]), None, out)
    assert out.tolist() == [[40, 0, 0]]


def test_what_the_cuda_chain_refuses(cuda_chain):
    base, factor = torch.zeros(1, 4, 64), torch.zeros(64, 32, dtype=torch.bfloat16)
    assert cuda_chain.why_not_chain(base, factor, factor) is None
    assert "bf16" in cuda_chain.why_not_chain(base, factor.float(), factor.float())
    assert "ranks" in cuda_chain.why_not_chain(base, factor[:, :16], factor[:, :16])
    assert "requests" in cuda_chain.why_not_chain(torch.zeros(9, 4, 64), factor, factor)


def test_large_batches_leave_the_chain_to_matrix_products():
    base = torch.zeros(markov_kernel.MAX_BATCH + 1, 1, 8)
    assert "requests" in markov_kernel.why_not_chain(base, torch.zeros(8, 4), torch.zeros(8, 4))


@dtypes
@pytest.mark.parametrize("rank", [0, 12])
def test_confidence_logits(dtype, rank):
    hidden, embedded = torch.randn(6, 43).to(dtype)[:, 3:], torch.randn(6, rank).to(dtype) if rank else None
    args = (hidden, embedded, torch.randn(1, 40 + rank), torch.randn(1))
    close(confidence_kernel.confidence_logits(*args), confidence_reference.confidence_logits(*args), torch.float32)


def test_keep_accepted():
    locs, lens = torch.arange(1, 13), torch.tensor([0, 2, 4])
    assert locs_reference.keep_accepted(locs, lens).tolist() == [0, 0, 0, 0, 5, 6, 0, 0, 9, 10, 11, 12]
    assert torch.equal(locs_kernel.keep_accepted(locs, lens), locs_reference.keep_accepted(locs, lens))
