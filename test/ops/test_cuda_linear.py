"""The register-form products: emulated on CPU tensors without a GPU, the real kernels on one."""

from __future__ import annotations

import json

import pytest
import torch

from ops.kda_case import same_bits
from sgling_kernel import cuda as runtime
from sgling_kernel import dispatch
from sgling_kernel.linear import cuda, gated_linear, linear, linear_fp32, reference, table
from sgling_kernel.logits import argmax_lowest, best_of_product
from sgling_kernel.norm import gated_rms_norm

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SHAPES = [(16, 64), (40, 320), (24, 1024)] if not GPU else [(16, 64), (5128, 2560), (2560, 1024), (2560, 5120)]
WIDE = [(16, 1536), (8, 2560), (8, 2720), (8, 5184)]  # every slicing and both ways to keep weights
STREAMED = [(147, 2560), (70, 5120)] if not GPU else [(39296, 2560), (2560, 5120)]


@pytest.fixture(autouse=True)
def _real_or_emulated(request):
    torch.set_default_device(DEVICE)
    if not GPU:
        request.getfixturevalue("emulated_cuda")
    yield
    torch.set_default_device("cpu")


def operands(rows: int, outputs: int, width: int, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, width + pad).bfloat16()[:, pad:]
    return x, (torch.randn(outputs, width) / width**0.5).bfloat16()


@pytest.mark.parametrize(("outputs", "width"), SHAPES)
@pytest.mark.parametrize("rows", [1, 6, 17, 30])
def test_products_equal_the_reference_up_to_the_order_of_the_sum(rows, outputs, width):
    x, w = operands(rows, outputs, width, pad=8)
    assert cuda.why_not_small_m(x, w) is None
    exact = x.double() @ w.double().t()
    torch.testing.assert_close(linear_fp32(x, w).double(), exact, atol=1e-4, rtol=1e-4)
    rounded = linear(x, w)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, linear_fp32(x, w).bfloat16())  # one rounding


@pytest.mark.parametrize(("outputs", "width"), WIDE)
@pytest.mark.parametrize("rows", [1, 9, 17])
def test_every_slicing_and_where_weights_wait_changes_no_bit(outputs, width, rows):
    x, w = operands(rows, outputs, width)
    results = [cuda.small_m_linear(x, w, torch.float32, form) for form in ("held", "parked")]
    torch.testing.assert_close(results[0].double(), x.double() @ w.double().t(), atol=1e-4, rtol=1e-4)
    assert torch.equal(*results)


@pytest.mark.parametrize(("outputs", "width"), STREAMED)
@pytest.mark.parametrize("rows", [1, 9, 12, 17, 20])
def test_a_streamed_product_is_right_row_by_row_and_has_the_register_forms_bits(outputs, width, rows):
    """More rows than the ring holds, a last CTA with fewer rows and an incomplete tile, passes over groups of rows."""
    x, w = operands(rows, outputs, width, pad=8)
    assert cuda.why_not_stream(w) is None
    got = cuda.small_m_linear(x, w, torch.float32, "streamed")
    torch.testing.assert_close(got.double(), x.double() @ w.double().t(), atol=1e-4, rtol=1e-4)
    alone = torch.cat([cuda.small_m_linear(x[i : i + 1], w, torch.float32, "streamed") for i in range(rows)])
    assert torch.equal(got, alone)
    if cuda.slicing(width)[0] == 16:
        assert torch.equal(got, cuda.small_m_linear(x, w, torch.float32, "held"))
        assert torch.equal(cuda.small_m_linear(x, w, torch.bfloat16, "streamed"), got.bfloat16())


@pytest.mark.parametrize("rows", [1, 9, 17])
def test_the_best_of_a_streamed_product_is_the_arg_max_of_its_scores(rows, monkeypatch):
    """Ties within a CTA's rows and across CTAs, a row of NaN, token ids that are not the columns."""
    outputs, width = STREAMED[0]
    monkeypatch.setattr(cuda, "MAX_OUT", outputs)
    x, w = operands(rows, outputs, width, pad=8)
    w[3], w[outputs // 2], w[-1] = w[7].clone(), w[7].clone(), w[7].clone()
    x[0] = w[7].sign()  # the four equal rows win
    if rows > 5:
        x[5] = float("nan")
    assert cuda.why_not_best_parts(x, w) is None
    want = argmax_lowest(linear_fp32(x, w))[1]
    assert want[0] == 3
    wide, ids = torch.zeros(rows, 3, dtype=torch.int64), torch.arange(outputs) * 5 + 2
    best_of_product(x, w, 11, wide[:, 1])
    assert torch.equal(wide[:, 1], want + 11)
    best_of_product(x, w, 11, wide[:, 2], ids)
    assert torch.equal(wide[:, 2], ids[want])
    assert not wide[:, 0].any()


def test_a_nan_stays_in_its_row():
    x, w = operands(10, 24, 96)
    clean = linear_fp32(x, w)
    x[3, 5] = float("nan")
    got = linear_fp32(x, w)
    assert bool(got[3].isnan().all())
    assert torch.equal(torch.cat((got[:3], got[4:])), torch.cat((clean[:3], clean[4:])))


def test_no_rows_no_launch():
    x, w = operands(4, 24, 96)
    assert linear(x[:0], w).shape == (0, 24)


def test_refusals_say_why():
    x, w = operands(4, 24, 96)
    cases = {
        "float32": (x.float(), w),
        "row major": (x.t().contiguous().t(), w),
        "16 bytes": (operands(4, 24, 96, pad=3)[0], w),
        "not contiguous": (x, torch.cat((w, w), 1)[:, :96]),
        "multiple of 32": (operands(4, 24, 72)[0], operands(4, 24, 72)[1]),
        "are streamed": (x, w[:1].expand(cuda.MAX_OUT, -1).contiguous()),
    }
    for text, pair in cases.items():
        assert text in cuda.why_not_small_m(*pair), text
    dispatch.set_kernel_switches(cuda_kernels=False)
    try:
        assert cuda.why_not_small_m(x, w) == runtime.why_not() is not None
    finally:
        dispatch.set_kernel_switches()


@pytest.mark.parametrize("kernels", [True, False], ids=["cuda", "triton"])
def test_columns_that_do_not_match_the_weight_raise(kernels):
    """A kernel would read rows of another length: past the operand's end, or of the row behind."""
    x, w = operands(4, 24, 96)
    dispatch.set_kernel_switches(cuda_kernels=kernels)
    try:
        for product in (linear, linear_fp32):
            with pytest.raises(RuntimeError, match="shape|size"):
                product(x[:, :64], w)
    finally:
        dispatch.set_kernel_switches()


def gated_operands(rows: int, heads: int, outputs: int) -> tuple:
    o, wide = torch.randn(rows, heads, 128).bfloat16() * 0.3, torch.randn(rows, heads * 129).bfloat16() * 2
    z = wide[:, heads:]  # aligned to 16 bytes for a multiple of eight heads
    w = (torch.randn(outputs, heads * 128) / (heads * 128) ** 0.5).bfloat16()
    return o, z, (1 + torch.randn(128) / 4).bfloat16(), 1e-6, w


@pytest.mark.parametrize("heads", cuda.GATED_HEADS)
@pytest.mark.parametrize("rows", [1, 6, 20])
def test_gated_product_equals_its_reference_and_is_close_to_the_two_node_form(heads, rows):
    operand = gated_operands(rows, heads, 24)
    assert cuda.why_not_gated(*operand[:3], operand[4]) is None
    got, folded, two_nodes = (
        form(*operand) for form in (gated_linear, reference.gated_linear_folded, reference.gated_linear)
    )
    scale = two_nodes.float().abs().max()
    assert (got.float() - folded.float()).abs().max() < 0.008 * scale  # one bf16 step of the output
    assert (got.float() - two_nodes.float()).norm() / two_nodes.float().norm() < 0.006


@pytest.mark.parametrize("heads", cuda.GATED_HEADS)
def test_a_row_of_a_gated_product_depends_on_itself_alone(heads):
    """Every group of tokens, full and not, and two passes; an incomplete tile of weight rows; a row of NaN."""
    o, z, *rest = gated_operands(33, heads, 40)
    o[7] = float("nan")
    alone = torch.cat([gated_linear(o[i : i + 1], z[i : i + 1], *rest) for i in range(33)])
    assert torch.equal(alone.isnan().all(1), torch.arange(33) == 7)
    for count in (2, 8, 9, 12, 17, 20, 33):
        picked = torch.randperm(33)[:count]
        assert same_bits(gated_linear(o[picked], z[picked], *rest), alone[picked])


def test_gated_product_of_zeros_and_extreme_gates():
    o, z, norm_weight, eps, w = gated_operands(4, 4, 16)
    o[1] = 0
    z[2], z[3] = -200.0, 200.0
    got = gated_linear(o, z, norm_weight, eps, w)
    assert bool(got.isfinite().all())
    assert not got[1].any() and not got[2].any()
    want = reference.gated_linear_folded(o, z, norm_weight, eps, w)
    torch.testing.assert_close(got[3].float(), want[3].float(), atol=0.01, rtol=0.01)


def test_other_heads_take_two_nodes():
    o, z = torch.randn(3, 4, 32).bfloat16(), torch.randn(3, 128).bfloat16()
    weight, w = torch.ones(32).bfloat16(), torch.randn(16, 128).bfloat16()
    assert "heads of 32" in cuda.why_not_gated(o, z, weight, w)
    want = linear(gated_rms_norm(o, z, weight, 1e-6).flatten(1), w)
    assert torch.equal(gated_linear(o, z, weight, 1e-6, w), want)


def test_where_weights_wait_is_read_from_the_table(tmp_path, monkeypatch):
    shape, wide = {"gpu": "G", "outputs": 5128, "width": 2560}, {"gpu": "G", "outputs": 2560, "width": 5120}
    lines = [
        {**shape, "rows": 1, "held_us": 9.0, "parked_us": 8.0},
        {**shape, "rows": 6, "held_us": 9, "parked_us": 8.9},
        {**wide, "rows": 1, "held_us": 11.7, "streamed_us": 9.4},
    ]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"rows": lines}))
    monkeypatch.setattr(table, "MEASURED", path)
    table.fastest_form.cache_clear()
    assert table.fastest_form("G", 5128, 2560, table.measured_rows(5)) == "parked"
    assert table.fastest_form("G", 5128, 2560, table.measured_rows(8)) == "held"  # within the margin
    assert table.fastest_form("G", 5128, 2560, table.measured_rows(160)) == "held"  # not measured
    assert table.fastest_form("other", 5128, 2560, 1) == "held"
    assert table.fastest_form("G", 2560, 5120, 1) == "streamed"
    table.fastest_form.cache_clear()
