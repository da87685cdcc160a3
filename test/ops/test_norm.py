"""Norms against fp64, their single rounding, and row independence."""

import pytest
import torch

from ops.kda_case import same_bits
from sgling_kernel.norm import fused_add_rms_norm, gated_rms_norm, rms_norm

EPS = 1e-6


def exact(x, weight):
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


def assert_one_rounding(got, want):
    """fp32: a few ulp. bf16: half an ulp of the exact value (2^-8 relative), and a hair for the fp32 inside."""
    assert got.isfinite().all()
    bound = 1e-6 if got.dtype == torch.float32 else 2**-8 * (1 + 1e-3)
    assert ((got.double() - want).abs() <= bound * want.abs() + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 256), (7, 64), (3, 4, 192), (2, 2560)])
def test_rms_norm_equals_fp64_with_a_single_rounding(shape, dtype):
    x, w = (torch.randn(shape) * 3).to(dtype), (torch.rand(shape[-1]) + 0.5).to(dtype)
    out = rms_norm(x, w, EPS)
    assert out.dtype == dtype
    assert_one_rounding(out, exact(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_add_norms_the_unrounded_sum_and_stores_the_rounded_one(dtype):
    x, residual, w = torch.randn(5, 256).to(dtype), torch.randn(5, 256).to(dtype), (torch.rand(256) + 0.5).to(dtype)
    kept = x.clone(), residual.clone()
    out, new_residual = fused_add_rms_norm(x, residual, w, EPS)
    total = x.float() + residual.float()
    assert torch.equal(new_residual, total.to(dtype))
    assert_one_rounding(out, exact(total, w))
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_is_per_head_with_a_sigmoid_gate_and_one_rounding(dtype):
    o, z, w = torch.randn(6, 4, 64).to(dtype), (torch.randn(6, 256) * 4).to(dtype), (torch.rand(64) + 0.5).to(dtype)
    out = gated_rms_norm(o, z, w, EPS)
    assert out.shape == o.shape and out.dtype == dtype
    assert_one_rounding(out, exact(o, w) * torch.sigmoid(z.double()).view(6, 4, 64))
    assert same_bits(out, gated_rms_norm(o, z.view(6, 4, 64), w, EPS))


def test_zero_and_huge_rows_stay_finite():
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e15), torch.full((64,), -1e-20)])
    out = rms_norm(x, torch.ones(64), EPS)
    assert out.isfinite().all() and not out[0].any()
    gate = torch.tensor([[-200.0], [0.0], [200.0]]).expand(3, 64)
    assert gated_rms_norm(x.view(3, 1, 64), gate, torch.ones(64), EPS).isfinite().all()


@pytest.mark.parametrize("heads,dim", [(4, 64), (1, 128), (3, 20), (2, 7)])
def test_row_bits_do_not_depend_on_the_batch(heads, dim):
    o, z, w = torch.randn(9, heads, dim), torch.randn(9, heads * dim), torch.rand(dim) + 0.5
    gated, plain, (added, _) = gated_rms_norm(o, z, w, EPS), rms_norm(o, w, EPS), fused_add_rms_norm(o, o, w, EPS)
    for r in range(9):
        row, gate = o[r : r + 1], z[r : r + 1]
        assert same_bits(gated_rms_norm(row, gate, w, EPS), gated[r : r + 1])
        assert same_bits(rms_norm(row, w, EPS), plain[r : r + 1])
        assert same_bits(fused_add_rms_norm(row, row, w, EPS)[0], added[r : r + 1])
