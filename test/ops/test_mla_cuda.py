"""Latent attention in CUDA C++: against the references and row by row; emulated on a CPU, the kernels on a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from ops.kda_case import same_bits
from sgling_kernel import cuda as runtime
from sgling_kernel.cuda import emulation
from sgling_kernel.cuda.build import compiler
from sgling_kernel.mla import PagedContext, cuda, reference
from sgling_kernel.rotary import rope_table

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SCALE = 192**-0.5
pytestmark = pytest.mark.skipif(compiler(emulated=not GPU) is None, reason="no compiler for the CUDA sources")


@pytest.fixture(autouse=True)
def _where():
    """Tensors lie on the device under test; without a GPU the kernels run emulated."""
    torch.manual_seed(7)
    torch.set_default_device(DEVICE)
    with nullcontext() if GPU else emulation():
        yield
    torch.set_default_device("cpu")


def close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-2) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert actual.shape == expected.shape and bool(actual.isfinite().all()) and error < bound, float(error)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def projected(rows: int, heads: int) -> tuple[torch.Tensor, ...]:
    """(q_nope, pe, latent, gate) as views of one projection, as the layer has them."""
    sizes = (heads * cuda.NOPE, (heads + 1) * cuda.ROPE, cuda.LATENT, heads)
    fused = randn(rows, -(-sum(sizes) // 8) * 8)[:, : sum(sizes)]
    first, pe, latent, gate = fused.split(sizes, dim=-1)
    return first.unflatten(-1, (heads, -1)), pe.unflatten(-1, (-1, cuda.ROPE)), latent, gate


class Cache:
    """A paged cache with shuffled slots, NaN where no row looks, and a page table wider than anything attended."""

    def __init__(self, seq_lens: list[int], width: int, columns: int = 700):
        used = sum(seq_lens) + width * len(seq_lens)
        slots = torch.randperm(used + 9) + 1
        self.pool = torch.full((used + 10, cuda.LATENT + cuda.ROPE), torch.nan).bfloat16()
        self.pool[slots[:used]] = randn(used, cuda.LATENT + cuda.ROPE)
        self.table, first = torch.full((len(seq_lens) + 1, columns), int(slots[used])), 0
        for row, length in enumerate(seq_lens, 1):
            self.table[row, : length + width] = slots[first : first + length + width]
            first += length + width
        rows = torch.arange(1, len(seq_lens) + 1)
        bound = max(seq_lens) + width
        self.context = PagedContext(self.table, rows, torch.tensor(seq_lens), width, bound, early=True)

    def alone(self, request: int, j: int) -> PagedContext:
        """The context of row j of a request as a plain decode step has it."""
        one, ctx = slice(request, request + 1), self.context
        return ctx._replace(req_pool_indices=ctx.req_pool_indices[one], seq_lens=ctx.seq_lens[one] + j, width=1)


def operands(rows: int, heads: int) -> tuple[torch.Tensor, ...]:
    """(q_lat, q_pe, w_vc, gate) of attention."""
    gate = randn(rows, heads + 3)[:, 3:]
    return (
        randn(rows, heads, cuda.LATENT),
        randn(rows, heads, cuda.ROPE),
        (torch.randn(heads, cuda.LATENT, cuda.VALUE) / cuda.LATENT**0.5).bfloat16(),
        gate,
    )


def decode(queries, cache: Cache, ctx: PagedContext, w_vc, gate) -> torch.Tensor:
    assert cuda.why_not_decode(*queries, cache.pool, ctx, w_vc, gate) is None
    return cuda.mla_decode_gated(*queries, cache.pool, ctx, SCALE, w_vc, gate)


def gated(latents: torch.Tensor, w_vc: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return reference.head_gate(reference.expand_v(latents, w_vc), gate)


@pytest.mark.parametrize(("rows", "heads"), [(1, 8), (11, 2)])
def test_preparation(rows, heads):
    q_nope, pe, latent, _ = projected(rows, heads)
    w_kc, weight = (torch.randn(heads, cuda.NOPE, cuda.LATENT) / cuda.NOPE**0.5).bfloat16(), randn(cuda.LATENT)
    latent[0, 3] = torch.inf
    rotary = torch.randint(0, 128, (rows,)), rope_table(128, cuda.ROPE, 1e4, DEVICE)
    loc, pools = torch.randperm(rows + 4)[:rows], torch.zeros(2, rows + 4, cuda.LATENT + cuda.ROPE).bfloat16()
    args = (pe, latent, (weight, 1e-6), rotary)
    assert cuda.why_not_prepare(q_nope, w_kc, pe, latent, weight, pools[0]) is None
    q_lat, q_pe = cuda.prepare_absorbed(q_nope, w_kc, *args, (pools[0], loc))
    close(q_lat, reference.absorb_q(q_nope, w_kc))
    latent[0] = latent[0].nan_to_num(posinf=0.0)
    want = reference.prepare(*args, (pools[1], loc))
    close(q_pe, want)
    assert not pools[0, loc[0], : cuda.LATENT].any()  # an infinite norm: every quotient is 0 or not a number
    pools[:, loc[0], : cuda.LATENT] = 0
    close(pools[0], pools[1])


@pytest.mark.parametrize("rows", [9, 40] if GPU else [9])
def test_preparation_of_a_row_alone_gives_its_bits(rows):
    heads = 8 if GPU else 1
    q_nope, pe, latent, _ = projected(rows, heads)
    w_kc, weight = randn(heads, cuda.NOPE, cuda.LATENT), randn(cuda.LATENT)
    table, positions = rope_table(128, cuda.ROPE, 1e4, DEVICE), torch.randint(0, 128, (rows,))
    loc, pool = torch.arange(rows), torch.zeros(rows, cuda.LATENT + cuda.ROPE).bfloat16()
    norm = (weight, 1e-6)
    whole = cuda.prepare_absorbed(q_nope, w_kc, pe, latent, norm, (positions, table), (pool, loc))
    for n in range(rows):
        one, own = slice(n, n + 1), torch.zeros_like(pool)
        args = (q_nope[one], w_kc, pe[one], latent[one], norm, (positions[one], table), (own, loc[one]))
        alone = cuda.prepare_absorbed(*args)
        assert all(same_bits(a, b[one]) for a, b in zip((*alone, own[one]), (*whole, pool), strict=True))


CASES = [(1, [300], 8), (3, [0, 127, 254], 4), (6, [250], 8), (17, [120], 2)]
if GPU:
    CASES += [(17, [8192], 8), (6, [8191, 5, 0, 700], 8), (40, [300, 900, 20000, 1], 8), (1, [40000], 32)]


@pytest.mark.parametrize(("width", "seq_lens", "heads"), CASES)
def test_decode(width, seq_lens, heads):
    cache = Cache(seq_lens, width, max(seq_lens) + width + 400)
    q_lat, q_pe, w_vc, gate = operands(width * len(seq_lens), heads)
    got = decode((q_lat, q_pe), cache, cache.context, w_vc, gate)
    close(got, gated(reference.mla_decode(q_lat, q_pe, cache.pool, cache.context, SCALE), w_vc, gate))
    for other in (cache.context._replace(kv_bound=10**6), cache.context._replace(early=False)):
        assert same_bits(decode((q_lat, q_pe), cache, other, w_vc, gate), got)


WIDTHS = [(6, [120]), (3, [126, 5])]
if GPU:
    WIDTHS = [(width, [8190]) for width in (2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 40)]
    WIDTHS += [(6, [127, 8190, 0, 700]), (17, [300, 17000, 5, 90]), (40, [300, 900, 2000, 1])]


@pytest.mark.parametrize(("width", "seq_lens"), WIDTHS)
def test_a_verify_row_has_the_bits_of_its_decode_step(width, seq_lens):
    heads = 8 if GPU else 4
    cache = Cache(seq_lens, width, max(seq_lens) + width + 400)
    q_lat, q_pe, w_vc, gate = operands(width * len(seq_lens), heads)
    together = decode((q_lat, q_pe), cache, cache.context, w_vc, gate)
    for request in range(len(seq_lens)):
        for j in range(width):
            n = slice(request * width + j, request * width + j + 1)
            one = decode((q_lat[n], q_pe[n]), cache, cache.alone(request, j), w_vc, gate[n])
            assert same_bits(one, together[n])


def test_bits_do_not_depend_on_how_the_combination_is_cut(monkeypatch):
    cache = Cache([130, 0], 3)
    q_lat, q_pe, w_vc, gate = operands(6, 2)
    whole = decode((q_lat, q_pe), cache, cache.context, w_vc, gate)
    for cut in ((1, 1), (4, 2), (4, 3)):
        if GPU and cut[0] > 1 and not runtime.has_clusters():
            continue
        monkeypatch.setattr(cuda, "_finish_cut", lambda device, rows, cut=cut: cut)
        assert same_bits(decode((q_lat, q_pe), cache, cache.context, w_vc, gate), whole)


def test_splits_of_one_program_in_turn(monkeypatch):
    monkeypatch.setattr(cuda, "PROGRAMS", 2)
    cache = Cache([300], 2)
    q_lat, q_pe, w_vc, gate = operands(2, 12)  # three tiles of rows
    got = decode((q_lat, q_pe), cache, cache.context, w_vc, gate)
    close(got, gated(reference.mla_decode(q_lat, q_pe, cache.pool, cache.context, SCALE), w_vc, gate))


def test_more_rows_than_one_pass_holds(monkeypatch):
    monkeypatch.setattr(cuda, "PROGRAMS", 1)
    cache = Cache([130], 2)
    q_lat, q_pe, w_vc, gate = operands(2, 44)  # eleven tiles in two groups of two passes, two splits each
    got = decode((q_lat, q_pe), cache, cache.context, w_vc, gate)
    close(got, gated(reference.mla_decode(q_lat, q_pe, cache.pool, cache.context, SCALE), w_vc, gate))


def test_a_padded_request_disturbs_nobody():
    cache = Cache([130], 2)
    cache.table[0], cache.pool[0] = 0, 1.0
    q_lat, q_pe, w_vc, gate = operands(4, 4)
    alone = decode((q_lat[:2], q_pe[:2]), cache, cache.context, w_vc, gate[:2])
    zero, ctx = torch.zeros(1, dtype=torch.int64), cache.context
    rows, lens = torch.cat((ctx.req_pool_indices, zero)), torch.cat((ctx.seq_lens, zero + 77))
    padded = decode((q_lat, q_pe), cache, ctx._replace(req_pool_indices=rows, seq_lens=lens), w_vc, gate)
    assert same_bits(padded[:2], alone) and bool(padded.isfinite().all())


def test_rows_ignore_the_later_rows_of_their_window():
    cache = Cache([130], 4)
    q_lat, q_pe, w_vc, gate = operands(4, 4)
    clean = decode((q_lat, q_pe), cache, cache.context, w_vc, gate)
    cache.pool[cache.table[1, 132:134]] = 3e38
    assert same_bits(decode((q_lat, q_pe), cache, cache.context, w_vc, gate)[:2], clean[:2])


def test_refusals_name_their_reason():
    cache = Cache([5], 1)
    q_lat, q_pe, w_vc, gate = operands(1, 4)
    ctx = cache.context
    assert "latent 48" in cuda.why_not_decode(q_lat[..., :48], q_pe, cache.pool, ctx, w_vc, gate)
    assert "q_lat" in cuda.why_not_decode(q_lat.float(), q_pe, cache.pool, ctx, w_vc, gate)
    assert "int64" in cuda.why_not_decode(
        q_lat, q_pe, cache.pool, ctx._replace(req_to_token=cache.table.int()), w_vc, gate
    )
    q_nope, pe, latent, _ = projected(2, 4)
    w_kc = randn(4, cuda.NOPE, cuda.LATENT)
    assert "w_kc" in cuda.why_not_prepare(q_nope, w_kc[:2], pe, latent, latent[0], cache.pool)
    shifted = randn(2, 4 * cuda.NOPE + 1)[:, 1:].unflatten(-1, (4, -1))
    assert "q_nope" in cuda.why_not_prepare(shifted, w_kc, pe, latent, latent[0].clone(), cache.pool)
