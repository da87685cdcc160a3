"""Matrix products: rounding points and the fixed-row test mode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgling_kernel.linear import (
    PackedWeight,
    fixed_row_count,
    fixed_rows,
    linear,
    linear_fp32,
    pack_weight,
    set_fixed_rows,
    why_not_packed,
)


def _operands(rows: int, k: int, out: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * k + out)
    return torch.randn(rows, k, generator=generator).to(dtype), torch.randn(out, k, generator=generator).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 17])
@pytest.mark.parametrize("block", [None, 1, 4, 16])
def test_linear_is_the_product_with_the_transposed_weight_in_every_mode(rows, block):
    x, w = _operands(rows, 64, 48)
    with fixed_rows(block):
        out = linear(x, w)
    assert out.shape == (rows, 48)
    torch.testing.assert_close(out.double(), x.double() @ w.double().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("product", [linear, linear_fp32])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize(("k", "out"), [(256, 768), (32, 256), (48, 10)])
def test_fixed_rows_make_a_row_independent_of_its_neighbours_and_place(product, block, k, out):
    x, w = _operands(21, k, out)
    with fixed_rows(block):
        together = product(x, w)
        for rows in (1, 2, 4, 7, 16, 20):
            assert torch.equal(product(x[:rows].clone(), w), together[:rows])
            assert torch.equal(product(x[-rows:].clone(), w), together[-rows:])


@pytest.mark.parametrize(("k", "out"), [(256, 1284), (512, 260), (256, 4100)])
@pytest.mark.parametrize("block", [None, 1, 8])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 33])
def test_packed_weights_give_the_product_in_every_mode(rows, block, k, out):
    x, w = _operands(rows, k, out)
    packed = pack_weight(w)
    assert isinstance(packed, PackedWeight)
    with fixed_rows(block):
        for product in (linear, linear_fp32):
            torch.testing.assert_close(product(x, packed).double(), x.double() @ w.double().T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("k, out", [(256, 1284), (256, 4100)])
def test_fixed_rows_make_a_row_independent_of_its_neighbours_under_packed_weights(block, k, out):
    x, w = _operands(21, k, out)
    packed = pack_weight(w)
    with fixed_rows(block):
        together = linear(x, packed)
        for rows in (1, 2, 4, 7, 16, 20):
            assert torch.equal(linear(x[:rows].clone(), packed), together[:rows])
            assert torch.equal(linear(x[-rows:].clone(), packed), together[-rows:])


def test_packed_weights_take_strided_rows():
    x, w = _operands(6, 256, 1284)
    wide = torch.cat((x, x, x[:, :3]), dim=1)
    torch.testing.assert_close(linear(wide[:, 256:512], pack_weight(w)), linear(x, w), atol=1e-4, rtol=1e-4)


def test_weights_that_would_not_gain_stay_as_they_are_and_the_reason_is_said():
    _, w = _operands(1, 256, 1284)
    with FakeTensorMode():
        fake = torch.zeros(1284, 256)
    for weight, reason in ((w[:8], "too few"), (w.bfloat16(), "not for torch.bfloat16"), (fake, "FakeTensor")):
        assert reason in why_not_packed(weight)
        assert pack_weight(weight) is weight
    assert why_not_packed(w) is None


def test_fixed_rows_restore_the_previous_setting_also_after_an_error():
    assert fixed_row_count() is None
    with pytest.raises(RuntimeError, match="inner"), fixed_rows(8):
        with fixed_rows(None):
            assert fixed_row_count() is None
        assert fixed_row_count() == 8
        raise RuntimeError("inner")
    assert fixed_row_count() is None


def test_fixed_rows_refuse_a_block_without_rows():
    with pytest.raises(ValueError, match="at least 1"):
        set_fixed_rows(0)


def test_linear_in_bf16_accumulates_in_fp32_and_rounds_once():
    x, w = torch.ones(1, 3, dtype=torch.bfloat16), torch.tensor([[256.0, 1.0, 1.0]], dtype=torch.bfloat16)
    assert linear(x, w).item() == 258  # 256 if any partial sum were bf16
    assert linear(x, w).dtype == torch.bfloat16


def test_linear_fp32_never_rounds_a_bf16_product_to_bf16():
    x, w = torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    out = linear_fp32(x, w)
    assert out.dtype == torch.float32 and out.item() == 257  # no bf16 number


@pytest.mark.parametrize("block", [None, 4])
def test_linear_reads_no_device_value_on_the_host(block):
    with fixed_rows(block), FakeTensorMode():
        assert linear(torch.zeros(6, 32), torch.zeros(8, 32)).shape == (6, 8)
        assert linear_fp32(torch.zeros(6, 32).bfloat16(), torch.zeros(8, 32).bfloat16()).dtype == torch.float32
