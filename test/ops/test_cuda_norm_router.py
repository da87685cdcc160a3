"""Residual add, norm and router product as one CUDA C++ node: its parts' bits, row invariance, refusals; emulated."""

from __future__ import annotations

import math

import pytest
import torch

from ops.kda_case import same_bits
from sgling_kernel import dispatch
from sgling_kernel.linear import cuda as linear_cuda
from sgling_kernel.norm import cuda as norm_cuda
from sgling_kernel.router import add_rms_norm_router, cuda, reference

pytestmark = pytest.mark.usefixtures("emulated_cuda")
EPS = 1e-6


def operands(rows: int, width: int, experts: int) -> tuple[torch.Tensor, ...]:
    """x, residual, norm weight, router weight."""
    x, residual = (torch.randn(rows, width).mul(3).bfloat16() for _ in range(2))
    return x, residual, (torch.rand(width) + 0.5).bfloat16(), (torch.randn(experts, width) / width**0.5).bfloat16()


def in_two_nodes(x, residual, norm, w):
    """What norm.cu and small_m.cu make of the same rows."""
    normed, stream = norm_cuda.fused_add_rms_norm(x, residual, norm, EPS)
    return normed, stream, linear_cuda.small_m_linear(normed, w, torch.float32)


@pytest.mark.parametrize(("width", "experts"), [(32, 16), (256, 40), (320, 64), (512, 8), (2560, 24)])
def test_bits_are_those_of_the_two_nodes(width, experts):
    x, residual, norm, w = operands(7, width, experts)
    assert cuda.why_not_norm_product(x, residual, norm, w) is None
    got = cuda.add_rms_norm_router(x, residual, norm, EPS, w)
    assert all(same_bits(a, b) for a, b in zip(got, in_two_nodes(x, residual, norm, w), strict=True))


def test_it_is_the_reference_within_one_rounding():
    args = operands(5, 2560, 32)
    normed, stream, logits = cuda.add_rms_norm_router(*args[:3], EPS, args[3])
    want = reference.add_rms_norm_router(*args[:3], EPS, args[3])
    assert torch.equal(stream, want[1]) and logits.dtype == torch.float32
    torch.testing.assert_close(normed.float(), want[0].float(), rtol=2**-7, atol=0)
    torch.testing.assert_close(logits, normed.float() @ args[3].float().t(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("width", [256, 320])
@pytest.mark.parametrize("rows", [*range(1, 34), 160])
def test_a_row_has_the_bits_it_has_alone(width, rows):
    pool = operands(8, width, 24)
    alone = [torch.cat(parts) for parts in zip(*(call(pool, [i]) for i in range(8)), strict=True)]
    picked = torch.randint(0, 8, (rows,))
    for got, want in zip(call(pool, picked), alone, strict=True):
        assert same_bits(got, want[picked])


def call(pool, rows):
    return cuda.add_rms_norm_router(pool[0][rows], pool[1][rows], pool[2], EPS, pool[3])


@pytest.mark.parametrize("share", range(1, 7))
def test_tokens_of_a_cta_change_no_bit(share):
    args = operands(13, 2560, 16)
    got = cuda.add_rms_norm_router(*args[:3], EPS, args[3], share)
    assert all(same_bits(a, b) for a, b in zip(got, in_two_nodes(*args), strict=True))


@pytest.mark.parametrize("share", [7, -1])
def test_other_shares_are_refused(share):
    args = operands(2, 64, 16)
    with pytest.raises(RuntimeError, match="norm_product"):
        cuda.add_rms_norm_router(*args[:3], EPS, args[3], share)


def test_every_row_belongs_to_a_share():
    for rows in range(1, dispatch.SMALL_ROWS + 1):
        assert 1 <= cuda.tokens_per_cta(rows) <= 6
    assert [cuda.tokens_per_cta(rows) for rows in (1, 2, 6, 8, 9, 17, 160)] == [1, 1, 2, 3, 3, 6, 6]


def test_rows_of_nan_and_infinity_stay_where_they_are():
    x, residual, norm, w = operands(8, 320, 24)
    clean = cuda.add_rms_norm_router(x, residual, norm, EPS, w)
    x[2], residual[5], x[6] = math.nan, math.inf, 1e30
    got = cuda.add_rms_norm_router(x, residual, norm, EPS, w)
    stay = [0, 1, 3, 4, 7]
    assert all(same_bits(a[stay], b[stay]) for a, b in zip(got, clean, strict=True))
    assert got[0][2].isnan().all() and got[2][2].isnan().all() and got[2][5].isnan().all()


def test_strided_rows_and_no_rows():
    x, residual, norm, w = operands(6, 320, 24)
    wide = torch.full((6, 336), math.nan, dtype=torch.bfloat16), torch.full((6, 400), math.nan, dtype=torch.bfloat16)
    wide[0][:, 8:328], wide[1][:, 40:360] = x, residual
    strided = wide[0][:, 8:328], wide[1][:, 40:360]
    assert cuda.why_not_norm_product(*strided, norm, w) is None
    got = cuda.add_rms_norm_router(*strided, norm, EPS, w)
    want = cuda.add_rms_norm_router(x, residual, norm, EPS, w)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    none = cuda.add_rms_norm_router(x[:0], residual[:0], norm, EPS, w)
    assert [t.shape for t in none] == [(0, 320), (0, 320), (0, 24)]


def test_it_says_why_it_refuses():
    x, residual, norm, w = operands(2, 320, 16)
    why_not = cuda.why_not_norm_product
    assert "x must be bf16" in why_not(x.float(), residual, norm, w)
    assert "the residual must be bf16" in why_not(x, residual.float(), norm, w)
    assert "the norm's weight" in why_not(x, residual, norm.float(), w)
    assert "the router" in why_not(x, residual, norm, w.float())
    assert "the router" in why_not(x, residual, norm, w.t().contiguous().t())
    assert "16 bytes" in why_not(torch.zeros(2, 324).bfloat16()[:, 4:], residual, norm, w)
    for width in (40, 544, 2304, 2528, 2592):
        assert f"rows of {width} values" in why_not(*operands(1, width, 16))


@pytest.mark.parametrize("width", [320, 544])
def test_what_one_node_cannot_take_runs_as_two(monkeypatch, width):
    """Rows of another length, and steps that are too wide for it to pay."""
    x, residual, norm, w = operands(3, width, 16)
    monkeypatch.setattr(cuda, "NORM_PRODUCT_ROWS", 3 if width == 544 else 2)
    monkeypatch.setattr(cuda, "add_rms_norm_router", None)  # must not be called
    got, want = add_rms_norm_router(x, residual, norm, EPS, w), in_two_nodes(x, residual, norm, w)
    assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])
    torch.testing.assert_close(got[2], want[2], rtol=1e-5, atol=2e-5)


def test_decode_rows_take_one_node(monkeypatch):
    monkeypatch.setattr("sgling_kernel.router.fused_add_rms_norm", None)  # must not be called
    args = operands(3, 320, 16)
    got, want = add_rms_norm_router(*args[:3], EPS, args[3]), cuda.add_rms_norm_router(*args[:3], EPS, args[3])
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
