"""Every Triton kernel against its reference: fp32 in the interpreter without a GPU, fp32 and bf16 on one."""

from __future__ import annotations

import pytest
import torch

from ops.kda_case import make_params, make_pools, make_rows, make_store, same_bits
from sgling_kernel.cache_locs import kernel as locs_kernel
from sgling_kernel.cache_locs import reference as locs_reference
from sgling_kernel.kda import kernel as kda_kernel
from sgling_kernel.kda import reference as kda_reference
from sgling_kernel.linear import kernel as linear_kernel
from sgling_kernel.logits import kernel as logits_kernel
from sgling_kernel.logits import reference as logits_reference
from sgling_kernel.mla import PagedContext
from sgling_kernel.mla import kernel as mla_kernel
from sgling_kernel.mla import reference as mla_reference
from sgling_kernel.moe import ExpertWeights
from sgling_kernel.moe import kernel as moe_kernel
from sgling_kernel.moe import reference as moe_reference
from sgling_kernel.norm import kernel as norm_kernel
from sgling_kernel.norm import reference as norm_reference
from sgling_kernel.rotary import rope_table
from sgling_kernel.router import RouterConfig
from sgling_kernel.router import kernel as router_kernel
from sgling_kernel.router import reference as router_reference
from sgling_kernel.verdict import kernel as verdict_kernel
from sgling_kernel.verdict import reference as verdict_reference

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _device():
    """Every tensor of a test lies on the device under test."""
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device("cpu")


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error of the whole tensor within what the dtype's roundings allow."""
    bound = 2e-5 if dtype == torch.float32 else 1e-2
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
    assert actual.shape == expected.shape and bool(actual.isfinite().all())
    assert error < bound, float(error)


def equal(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Bit-equal; with fp32 activations on a GPU close, since no rounding hides how the compiler contracts the conv."""
    if not (GPU and dtype == torch.float32):
        return same_bits(actual, expected)
    close(actual, expected, dtype)
    return True


def strided(rows: int, columns: int, dtype: torch.dtype, pad: int = 7) -> torch.Tensor:
    """A view into wider rows, as the parts of a fused projection are."""
    return torch.randn(rows, columns + pad).to(dtype)[:, pad:]


@dtypes
def test_norms(dtype):
    x, weight = strided(5, 96, dtype), torch.randn(96).to(dtype)
    close(norm_kernel.rms_norm(x, weight, 1e-6), norm_reference.rms_norm(x, weight, 1e-6), dtype)
    other = torch.randn(5, 96).to(dtype)
    got, want = (m.fused_add_rms_norm(x, other, weight, 1e-6) for m in (norm_kernel, norm_reference))
    close(got[0], want[0], dtype)
    close(got[1], want[1], dtype)
    o, z, head_weight = torch.randn(5, 4, 24).to(dtype), strided(5, 96, dtype), torch.randn(24).to(dtype)
    args = (o, z, head_weight, 1e-6)
    close(norm_kernel.gated_rms_norm(*args), norm_reference.gated_rms_norm(o, z.contiguous(), *args[2:]), dtype)


@dtypes
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 40, 64), (6, 24, 200), (40, 72, 320)])
def test_small_m_linear_and_its_row_invariance(dtype, rows, outputs, width):
    x, w = strided(rows, width, dtype), (torch.randn(outputs, width) / width**0.5).to(dtype)
    got = linear_kernel.small_m_linear(x, w, torch.float32)
    close(got, x.double() @ w.double().t(), dtype)
    alone = torch.cat([linear_kernel.small_m_linear(x[i : i + 1], w, torch.float32) for i in range(rows)])
    assert same_bits(got, alone) or not GPU  # the interpreter multiplies with numpy, whose bits depend on the shape


def test_argmax_lowest_with_ties_and_nan():
    scores = torch.randn(4, 5000)
    scores[0, [7, 3000, 4999]] = 9.0
    scores[1, 100] = float("nan")
    scores[2] = -torch.inf
    scores[3, 2049] = torch.inf
    (score, column), (want_score, want) = (m.argmax_lowest(scores) for m in (logits_kernel, logits_reference))
    assert column.tolist() == want.tolist() and column[0] == 7 and column[2] == 0
    assert torch.equal(score, want_score)


@pytest.mark.parametrize("config", [(4, 2, 3, True, 2.5), (1, 1, 4, True, 1.0), (8, 4, 8, False, 1.0)])
def test_grouped_topk(config):
    config = RouterConfig(*config)
    logits, bias = torch.randn(6, 64).round(decimals=1), torch.randn(64).round(decimals=1) * 0.1  # many ties
    (weights, ids), (want_weights, want_ids) = (
        m.grouped_topk(logits, bias, config) for m in (router_kernel, router_reference)
    )
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights, want_weights)


def make_experts(count: int | None, width: int, dim: int, limit, dtype) -> ExpertWeights:
    lead = () if count is None else (count,)
    w13 = (torch.randn(*lead, 2 * width, dim) / dim**0.5).to(dtype)
    return ExpertWeights(w13, (torch.randn(*lead, dim, width) / width**0.5).to(dtype), limit)


@dtypes
@pytest.mark.parametrize(("limit", "shared_limit"), [(None, None), (0.4, 0.7)])
def test_experts_by_pair(dtype, limit, shared_limit):
    experts, shared = make_experts(8, 24, 72, limit, dtype), make_experts(None, 24, 72, shared_limit, dtype)
    x, weights, ids = strided(5, 72, dtype), torch.rand(5, 3), torch.randint(0, 8, (5, 3))
    routed = moe_reference.moe_experts(x, experts.w13, experts.w2, weights, ids, limit)
    close(moe_kernel.experts_by_pair(x, experts, None, weights, ids), routed, dtype)
    total = routed + moe_reference.dense_ffn(x, *shared)
    close(moe_kernel.experts_by_pair(x, experts, shared, weights, ids), total, dtype)


@dtypes
def test_swiglu(dtype):
    gu = strided(5, 80, dtype)
    for limit in (None, 0.5):
        close(moe_kernel.swiglu(gu, limit), moe_reference.swiglu(gu, limit), dtype)


def round_of(dtype, width, heads=2, dim=24, bs=3, layers=2):
    """(params per layer, rows per layer, pools, slots, seq_lens) of a verify round."""
    torch.manual_seed(3)
    params = [make_params(heads, dim) for _ in range(layers)]
    rows = [make_rows(bs * width, heads, dim, dtype) for _ in range(layers)]
    pools = make_pools(layers, bs + 1, heads, dim, dtype)
    return params, rows, pools, torch.tensor([2, 1, 3]), torch.tensor([5, 14, 31])


@dtypes
@pytest.mark.parametrize("width", [1, 3])
def test_kda_verify_and_commit(dtype, width):
    params, rows, pools, slots, seq_lens = round_of(dtype, width)
    ring = make_store("replay", pools, width, ring=8, fill=0.0)
    stage, mine = make_store("staged", pools, width, fill=0.0), make_store("replay", pools, width, ring=8, fill=0.0)
    for i, p in enumerate(params):
        layer = [type(s)(*(t[i] for t in s)) for s in (ring, mine, stage)]
        want = kda_reference.kda_verify_replay(*rows[i], p, *pools.layer(i), slots, seq_lens, width, layer[0])
        got = kda_kernel.kda_verify_replay(*rows[i], p, *pools.layer(i), slots, seq_lens, width, layer[1])
        close(got, want, dtype)
        staged = kda_kernel.kda_verify_staged(*rows[i], p, *pools.layer(i), slots, width, layer[2])
        assert equal(staged, got, dtype)
    for stored, expected in zip(mine, ring, strict=True):
        close(stored, expected, dtype)
    for accept in (0, 1, width):
        accept_lens = torch.full_like(slots, accept)
        replayed, copied, reference = pools.clone(), pools.clone(), pools.clone()
        kda_kernel.commit_replay(*replayed, mine, slots, seq_lens, accept_lens, width)
        kda_reference.commit_replay(*reference, ring, slots, seq_lens, accept_lens, width)
        kda_reference.commit_staged(*copied, stage, slots, accept_lens)
        for a, b, c in zip(replayed, copied, reference, strict=True):
            assert equal(a[:, 1:], b[:, 1:], dtype)  # both rollbacks give the same bits
            close(a[:, 1:], c[:, 1:], dtype)


@dtypes
def test_kda_decode_equals_a_committed_verify(dtype):
    width = 3
    params, rows, pools, slots, seq_lens = round_of(dtype, width)
    ring = make_store("replay", pools, width, ring=8, fill=0.0)
    stepped, verified = pools.clone(), pools.clone()
    for i, p in enumerate(params):
        own = type(ring)(*(t[i] for t in ring))
        whole = kda_kernel.kda_verify_replay(*rows[i], p, *verified.layer(i), slots, seq_lens, width, own)
        for j in range(width):
            one = rows[i].pick(torch.arange(3) * width + j)
            out = kda_kernel.kda_decode(*one, p, *stepped.layer(i), slots)
            assert equal(out, whole.view(3, width, *out.shape[1:])[:, j].contiguous(), dtype)
    kda_kernel.commit_replay(*verified, ring, slots, seq_lens, torch.full_like(slots, width), width)
    assert all(equal(a[:, 1:], b[:, 1:], dtype) for a, b in zip(stepped, verified, strict=True))


def paged(seq_lens, width, dtype, latent, rope):
    """A cache whose unused slots are NaN and whose page table is wider than anything attended."""
    used = sum(seq_lens) + width * len(seq_lens)
    slots = torch.randperm(used + 9) + 1
    pool = torch.full((used + 10, latent + rope), float("nan")).to(dtype)
    pool[slots[:used]] = torch.randn(used, latent + rope).to(dtype)
    table, first = torch.full((len(seq_lens) + 1, 1000), int(slots[used])), 0
    for row, length in enumerate(seq_lens, 1):
        table[row, : length + width] = slots[first : first + length + width]
        first += length + width
    rows = torch.arange(1, len(seq_lens) + 1)
    return pool, PagedContext(table, rows, torch.tensor(seq_lens), width, max(seq_lens) + width)


@dtypes
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("programs", [mla_kernel.PROGRAMS, 2], ids=["one split each", "several splits each"])
def test_mla_decode(dtype, width, programs, monkeypatch):
    monkeypatch.setattr(mla_kernel, "PROGRAMS", programs)
    heads, latent, rope = 4, 48, 16
    pool, ctx = paged([0, 127, 300], width, dtype, latent, rope)
    q_lat = torch.randn(heads, 3 * width, latent).to(dtype).transpose(0, 1)
    q_pe = torch.randn(3 * width, heads, rope).to(dtype)
    got = mla_kernel.mla_decode(q_lat, q_pe, pool, ctx, 0.1)
    close(got, mla_reference.mla_decode(q_lat, q_pe, pool, ctx, 0.1), dtype)
    wider = mla_kernel.mla_decode(q_lat, q_pe, pool, ctx._replace(kv_bound=1000), 0.1)
    assert same_bits(got, wider)


@dtypes
def test_mla_projections_and_preparation(dtype):
    heads, latent, rope = 4, 48, 16
    x, w = torch.randn(5, heads, 24).to(dtype), torch.randn(heads, 24, latent).to(dtype)
    close(mla_kernel.per_head(x, w), mla_reference.absorb_q(x, w), dtype)
    gate = strided(5, heads, dtype)
    close(mla_kernel.head_gate(x, gate), mla_reference.head_gate(x, gate), dtype)
    fused = torch.randn(5, (heads + 1) * rope + latent + 3).to(dtype)
    pe, c = fused[:, : (heads + 1) * rope].unflatten(-1, (-1, rope)), fused[:, (heads + 1) * rope : -3]
    weight, positions = torch.randn(latent).to(dtype), torch.tensor([3, 4, 5, 90, 91])
    rotary = (positions, rope_table(128, rope, 1e4, DEVICE))
    results = []
    for module in (mla_kernel, mla_reference):
        pool = torch.zeros(9, latent + rope, dtype=dtype)
        q_pe = module.prepare(pe, c, (weight, 1e-6), rotary, (pool, torch.tensor([5, 1, 8, 2, 3])))
        results.append((q_pe, pool))
    for got, want in zip(*results, strict=True):
        close(got, want, dtype)


def test_step_metadata_and_chain_accept():
    table, rows = torch.randint(1, 90, (4, 40)), torch.tensor([2, 0, 3])
    lengths, slots = torch.tensor([31, 7, 5, 0]), torch.tensor([9, 1, 2, 3])
    for width in (1, 4):
        shapes = ((3,), (3,), (3, width), (3, width))
        got, want = (tuple(torch.full(shape, -1) for shape in shapes) for _ in range(2))
        for module, out in ((locs_kernel, got), (locs_reference, want)):
            module.fill_step_metadata(lengths, slots, table, rows, out)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    candidates, targets = torch.randint(0, 2, (200, 5)), torch.randint(0, 2, (200, 5))
    for width in (1, 5):
        pair = (candidates[:, :width], targets[:, :width])
        got, want = (m.chain_accept(*pair) for m in (verdict_kernel, verdict_reference))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
