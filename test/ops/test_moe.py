"""Feed-forward operators: clamped SwiGLU, dense FFN and routed experts on every path."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgling_kernel.linear import fixed_rows
from sgling_kernel.moe import dense_ffn, interleave_w13, moe_experts, reference, swiglu, why_not_grouped
from sgling_kernel.moe.cpu import empty_experts, experts_by_bag, experts_by_row, experts_grouped, why_not_bags

E, D, WIDTH, K = 8, 48, 16, 3
PATHS = [experts_grouped, experts_by_row, reference.moe_experts, moe_experts]


def _layer(dtype: torch.dtype = torch.float32, gain: float = 0.3):
    generator = torch.Generator().manual_seed(7)
    gate, up = (torch.randn(E, WIDTH, D, generator=generator).mul(gain).to(dtype) for _ in range(2))
    return gate, up, torch.randn(E, D, WIDTH, generator=generator).mul(gain).to(dtype)


def _rows(rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, E, generator=generator).topk(K).indices
    return torch.randn(rows, D, generator=generator), torch.rand(rows, K, generator=generator), ids


def _oracle(x, gate, up, down, weights, ids, limit):
    """Row by row and slot by slot in fp64, gate and up weights apart."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for n in range(x.shape[0]):
        for weight, expert in zip(weights[n].tolist(), ids[n].tolist(), strict=True):
            g, u = gate[expert].double() @ x[n].double(), up[expert].double() @ x[n].double()
            activated = g * torch.sigmoid(g)
            if limit:
                activated, u = activated.clamp(max=limit), u.clamp(-limit, limit)
            out[n] += weight * (down[expert].double() @ (activated * u))
    return out


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [0, 1, 2, 6, 40])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_every_path_equals_a_per_expert_loop(path, rows, limit):
    gate, up, down = _layer()
    x, weights, ids = _rows(rows)
    out = path(x, interleave_w13(gate, up), down, weights, ids, limit)
    assert out.shape == (rows, D)
    torch.testing.assert_close(out.double(), _oracle(x, gate, up, down, weights, ids, limit), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_all_tokens_on_one_expert(path):
    gate, up, down = _layer()
    x, weights, _ = _rows(10)
    ids = torch.full((10, K), 5)
    out = path(x, interleave_w13(gate, up), down, weights, ids, None)
    torch.testing.assert_close(out.double(), _oracle(x, gate, up, down, weights, ids, None), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stray", [1e38, math.inf, math.nan])
def test_stray_values_in_experts_nobody_chose_change_no_bit(path, stray):
    gate, up, down = _layer()
    x, weights, ids = _rows(6)
    ids = ids % 5
    clean = path(x, interleave_w13(gate, up), down, weights, ids, None)
    for weight in (gate, up, down):
        weight[5:] = stray
    assert torch.equal(path(x, interleave_w13(gate, up), down, weights, ids, None), clean)


@pytest.mark.parametrize("path", PATHS)
def test_slot_order_does_not_move_a_weight_to_another_expert(path):
    gate, up, down = _layer()
    x, weights, ids = _rows(7)
    shuffle = torch.tensor([2, 0, 1])
    a = path(x, interleave_w13(gate, up), down, weights, ids, None)
    b = path(x, interleave_w13(gate, up), down, weights[:, shuffle], ids[:, shuffle], None)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def _column_major(*weights: torch.Tensor) -> list[torch.Tensor]:
    """The same weights in the memory order of a CPU."""
    return [empty_experts(tuple(w.shape), w.dtype, "cpu").copy_(w) for w in weights]


@pytest.mark.parametrize("rows", [0, 1, 2, 6, 40])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_bags_of_weight_columns_equal_a_per_expert_loop(rows, limit):
    gate, up, down = _layer()
    x, weights, ids = _rows(rows)
    w13, w2 = _column_major(interleave_w13(gate, up), down)
    assert why_not_bags(x, w13, w2) is None
    expected = _oracle(x, gate, up, down, weights, ids, limit)
    for path in (experts_by_bag, moe_experts, experts_grouped):
        torch.testing.assert_close(path(x, w13, w2, weights, ids, limit).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("block", [None, 8])
def test_bags_give_a_row_the_same_bits_alone_and_in_a_batch_and_read_no_expert_nobody_chose(block):
    gate, up, down = _layer()
    w13, w2 = _column_major(interleave_w13(gate, up), down)
    x, weights, ids = _rows(37)
    ids = ids % 5
    w13[5:], w2[5:] = math.nan, math.nan
    together = experts_by_bag(x, w13, w2, weights, ids, 0.5)
    assert together.isfinite().all()
    with fixed_rows(block):
        for n in (0, 3, 36):
            row = slice(n, n + 1)
            alone = moe_experts(x[row].clone(), w13, w2, weights[row].clone(), ids[row].clone(), 0.5)
            assert torch.equal(alone, together[row])


def test_bags_say_why_they_refuse():
    gate, up, down = _layer()
    w13, w2 = _column_major(interleave_w13(gate, up), down)
    x, _, _ = _rows(2)
    assert "not contiguous" in why_not_bags(x, interleave_w13(gate, up), w2)
    assert "not in torch.bfloat16" in why_not_bags(x.bfloat16(), w13, w2)
    assert empty_experts((2, 4, 8), torch.float32, "meta").is_contiguous()


def test_fixed_rows_make_a_row_independent_of_its_neighbours():
    gate, up, down = _layer()
    w13 = interleave_w13(gate, up)
    x, weights, ids = _rows(37)
    with fixed_rows(8):
        together = moe_experts(x, w13, down, weights, ids, None)
        dense = dense_ffn(x, w13[0], down[0], 0.5)
        for start, stop in ((0, 1), (36, 37), (3, 5), (10, 31)):
            rows = slice(start, stop)
            alone = moe_experts(x[rows].clone(), w13, down, weights[rows].clone(), ids[rows].clone(), None)
            assert torch.equal(alone, together[rows])
            assert torch.equal(dense_ffn(x[rows].clone(), w13[0], down[0], 0.5), dense[rows])


def test_swiglu_clamps_after_silu_above_only_and_up_on_both_sides():
    def one(gate: float, up: float, limit: float | None) -> float:
        return swiglu(torch.tensor([[gate, up]], dtype=torch.float32), limit).item()

    silu = {g: g / (1 + math.exp(-g)) for g in (10.0, -1.0)}
    assert one(10, 1, 4.0) == 4  # silu(min(10, 4)) would be 3.93
    assert one(10, 9, 4.0) == 16 and one(10, -9, 4.0) == -16
    assert one(-1, 1, 0.1) == pytest.approx(0.1 * silu[-1.0])  # silu is not clamped from below, up is
    assert one(10, 9, None) == one(10, 9, 0) == pytest.approx(9 * silu[10.0])


def test_swiglu_is_finite_at_the_ends_of_the_range():
    gu = torch.tensor([[-1e4, 1.0, 1e4, 1.0, 0.0, 5.0]])
    assert swiglu(gu, None).tolist() == [[0.0, 1e4, 0.0]]


def test_swiglu_of_bf16_multiplies_in_fp32_and_rounds_once():
    gu = torch.randn(5, 2 * WIDTH, generator=torch.Generator().manual_seed(1)).mul(3).bfloat16()
    assert torch.equal(swiglu(gu, 2.0), swiglu(gu.float(), 2.0).bfloat16())


def test_swiglu_gives_an_element_the_same_bits_wherever_it_lies():
    gu = torch.randn(33, 2 * WIDTH, generator=torch.Generator().manual_seed(2))
    together = swiglu(gu, None)
    assert all(torch.equal(swiglu(gu[n, : 2 * m].clone(), None), together[n, :m]) for n in (0, 32) for m in (1, 5, 16))


def test_w13_interleaves_gate_rows_at_even_and_up_rows_at_odd_places():
    gate, up, _ = _layer()
    w13 = interleave_w13(gate, up)
    assert w13.shape == (E, 2 * WIDTH, D) and w13.is_contiguous()
    assert torch.equal(w13[:, 0::2], gate) and torch.equal(w13[:, 1::2], up)
    assert torch.equal(interleave_w13(gate[0], up[0]), w13[0])


def test_dense_ffn_equals_an_expert_with_weight_one():
    gate, up, down = _layer()
    x, _, _ = _rows(5)
    ids, weights = torch.full((5, 1), 2), torch.ones(5, 1)
    out = dense_ffn(x, interleave_w13(gate[2], up[2]), down[2], 0.5)
    torch.testing.assert_close(out.double(), _oracle(x, gate, up, down, weights, ids, 0.5), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_expert_outputs_in_bf16_are_summed_before_the_one_rounding(path):
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    x[:, 0] = 1
    gate = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    gate[:, :, 0] = 1  # every hidden unit is h = bf16(silu(1))
    down = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    down[0, :, 0], down[0, :, 1], down[1, :, 0] = 256, 1, -256
    ids, weights = torch.tensor([[0, 1], [0, 1]]), torch.ones(2, 2)
    out = path(x, interleave_w13(gate, gate), down, weights, ids, None)
    hidden = swiglu(torch.ones(2, dtype=torch.bfloat16), None)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, hidden.expand(2, 8))  # 257 h - 256 h; 0 if a slot were rounded to bf16


@pytest.mark.parametrize("path", PATHS)
def test_bf16_experts_stay_close_to_the_fp64_loop(path):
    gate, up, down = _layer(torch.bfloat16, gain=0.1)
    x, weights, ids = _rows(9)
    x = x.bfloat16()
    expected = _oracle(x, gate, up, down, weights, ids, None)
    out = path(x, interleave_w13(gate, up), down, weights, ids, None)
    torch.testing.assert_close(out.double(), expected, atol=5e-3, rtol=2e-2)


def test_grouped_path_says_why_it_refuses_and_the_result_is_still_right():
    x, weights, ids = _rows(6)
    gate, up, down = (w.narrow(-1, 0, w.shape[-1]) for w in _layer())
    assert why_not_grouped(x, interleave_w13(gate, up), down) is None
    gate, up, down = gate[:, :6].contiguous(), up[:, :6].contiguous(), down[..., :6].contiguous()
    w13 = interleave_w13(gate, up)
    assert "w2 (6 values) is no multiple of 16 bytes" in why_not_grouped(x, w13, down)
    out = moe_experts(x, w13, down, weights, ids, None)
    torch.testing.assert_close(out.double(), _oracle(x, gate, up, down, weights, ids, None), atol=1e-5, rtol=1e-4)
    assert "not for meta" in why_not_grouped(x.to("meta"), w13, down)


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("rows", [1, 6, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_read_no_device_value_on_the_host(block, rows, dtype):
    with fixed_rows(block), FakeTensorMode():
        x = torch.zeros(rows, D, dtype=dtype)
        w13, down = (empty_experts(shape, dtype, "cpu") for shape in ((E, 2 * WIDTH, D), (E, D, WIDTH)))
        out = moe_experts(x, w13, down, torch.ones(rows, K), torch.zeros(rows, K, dtype=torch.int64), 4.0)
        assert out.shape == (rows, D) and out.dtype == dtype
        again = moe_experts(
            x, w13.contiguous(), down, torch.ones(rows, K), torch.zeros(rows, K, dtype=torch.int64), 4.0
        )
        assert again.shape == (rows, D)
        assert dense_ffn(x, w13[0], down[0], 4.0).shape == (rows, D)
