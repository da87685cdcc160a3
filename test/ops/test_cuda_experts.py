"""Experts in CUDA C++: products, roundings, grouping of rows and finish against the references; emulated on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.kda_case import same_bits
from sgling_kernel.moe import ExpertOutputs, ExpertWeights, cuda, reference

pytestmark = pytest.mark.usefixtures("emulated_cuda")

DIM, WIDTH, EXPERTS, TOP = 256, 64, 8, 4
LIMIT, SHARED_LIMIT = 0.4, 0.7


def layer(dim: int = DIM, width: int = WIDTH, experts: int = EXPERTS) -> tuple[ExpertWeights, ExpertWeights]:
    """Routed experts and a shared one, with different clamps that bind."""

    def weights(*lead: int) -> tuple[Tensor, Tensor]:
        w13 = torch.randn(*lead, 2 * width, dim) * (2 / dim**0.5)
        return w13.bfloat16(), (torch.randn(*lead, dim, width) / width**0.5).bfloat16()

    return ExpertWeights(*weights(experts), LIMIT), ExpertWeights(*weights(), SHARED_LIMIT)


def rows_of(count: int, dim: int = DIM, experts: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    """(x in wider rows, weights, distinct ids of a row)."""
    x = torch.randn(count, dim + 8).bfloat16()[:, 8:]
    return x, torch.rand(count, TOP), torch.rand(count, experts).topk(TOP).indices


def expected_slots(x: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, ids: Tensor) -> Tensor:
    """Every slot's down product in fp64 on hidden values rounded where the specification says, [N, slots, d]."""
    slots = []
    for row, chosen in zip(x, ids, strict=True):
        sets = [(experts.w13[e], experts.w2[e], experts.limit) for e in chosen] + ([shared] if shared else [])
        for w13, w2, limit in sets:
            gu = (w13.double() @ row.double()).float().bfloat16()
            slots.append(w2.double() @ reference.swiglu(gu, limit).double())
    return torch.stack(slots).view(x.shape[0], -1, x.shape[1])


def assert_close(got: Tensor, want: Tensor) -> None:
    """A hidden value may fall to the other side of its rounding: 2^-8 of it, among `width` that are summed."""
    assert got.shape == want.shape and bool(got.isfinite().all())
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < 3e-3, float(error)
    assert ((got.double() - want.double()).abs() < 0.05 * want.double().abs().max()).all()


def slots_of(x: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, ids: Tensor, ctas: int) -> Tensor:
    return cuda.down(cuda.up(x, experts, shared, ids, ctas), experts, shared, ids, ctas)


@pytest.mark.parametrize("ctas", [0, 1, 5])
@pytest.mark.parametrize("with_shared", [True, False])
def test_slots_equal_fp64_products_in_both_forms(ctas, with_shared):
    (experts, shared), (x, _, ids) = layer(), rows_of(3)
    shared = shared if with_shared else None
    assert_close(slots_of(x, experts, shared, ids, ctas), expected_slots(x, experts, shared, ids))


@pytest.mark.parametrize(("dim", "width"), [(2560, 32), (1536, 96), (256, 192), (256, 384)])
def test_other_slicings_of_both_products(dim, width):
    (experts, shared), (x, _, ids) = layer(dim, width, 2), rows_of(2, dim)
    ids = ids % 2
    each, grouped = (slots_of(x, experts, shared, ids, ctas) for ctas in (0, 7))
    assert_close(each, expected_slots(x, experts, shared, ids))
    assert same_bits(each, grouped)


def test_a_row_has_the_same_bits_alone_in_company_and_in_both_forms():
    (experts, shared), (x, _, ids) = layer(), rows_of(9)
    ids[5] = ids[2]  # the same experts for a row with the same tile ...
    x[5] = torch.randn(DIM) * 1e4  # ... and values that would show in a shared sum
    x[7] = math.nan
    together = slots_of(x, experts, shared, ids, 5)
    assert same_bits(slots_of(x, experts, shared, ids, 0), together)
    for row in range(9):
        one = slice(row, row + 1)
        for ctas in (0, 2):
            assert same_bits(slots_of(x[one], experts, shared, ids[one], ctas), together[one])
    swapped = [5, 7, 0, 2, 8, 1, 3, 6, 4]
    assert same_bits(slots_of(x[swapped], experts, shared, ids[swapped], 3), together[swapped])


def test_more_rows_than_a_tile_holds_on_one_expert():
    experts, shared = layer(experts=3)
    x, _, _ = rows_of(19)
    ids = torch.full((19, TOP), 2)  # 76 pairs of one expert: ten tiles of tokens
    ids[4, 1] = 0
    got = slots_of(x, experts, shared, ids, 5)
    assert_close(got, expected_slots(x, experts, shared, ids))
    assert same_bits(got, slots_of(x, experts, shared, ids, 0))


def test_an_id_that_names_no_expert_gives_zeros_and_disturbs_nobody():
    (experts, shared), (x, _, ids) = layer(), rows_of(4)
    whole = slots_of(x, experts, shared, ids, 5)
    masked = ids.clone()
    masked[0, 1], masked[3] = -1, EXPERTS
    gone = torch.zeros(4, TOP + 1, dtype=torch.bool)
    gone[0, 1], gone[3, :TOP] = True, True
    for ctas in (0, 5):
        got = slots_of(x, experts, shared, masked, ctas)
        assert not got[gone].any()
        assert same_bits(got[~gone], whole[~gone])


def test_experts_nobody_chose_are_not_read():
    (experts, shared), (x, _, ids) = layer(), rows_of(5)
    ids = ids % 5
    clean = slots_of(x, experts, shared, ids, 5)
    experts.w13[5:], experts.w2[5:] = math.nan, math.nan
    assert same_bits(slots_of(x, experts, shared, ids, 5), clean)


def outputs_of(rows: int, dim: int, shared: bool, top: int = TOP) -> ExpertOutputs:
    values = torch.randn(rows, top + shared, dim) * torch.tensor([1.0, 100.0])[torch.randint(2, (rows, 1, 1))]
    return ExpertOutputs(values, torch.rand(rows, top), torch.bfloat16)


@pytest.mark.parametrize(("dim", "top"), [(256, 4), (2560, 8), (100, 1)])
@pytest.mark.parametrize("shared", [True, False])
def test_combine_weighs_and_sums_in_fp32_and_rounds_like_the_reference(dim, top, shared):
    outputs = outputs_of(3, dim, shared, top)
    got, want = cuda.combine(outputs), reference.combine(outputs)
    off = got != want
    assert off.float().mean() < 0.02  # fp32 sums in another order, seen through one rounding
    torch.testing.assert_close(got.float(), want.float(), atol=1e-2 * float(want.abs().max()), rtol=2**-7)


def test_ctas_of_a_row_change_no_bit_and_must_divide_its_warps():
    outputs = outputs_of(2, 2560, True)
    for ctas in (2, 4, 5):
        assert same_bits(cuda.combine(outputs, ctas), cuda.combine(outputs, 1))
    with pytest.raises(RuntimeError):
        cuda.combine(outputs, 3)


def test_slots_are_not_rounded_before_they_are_summed():
    values = torch.tensor([257.0, -256.0, 3.0]).view(1, 3, 1).expand(1, 3, 64).contiguous()
    outputs = ExpertOutputs(values, torch.ones(1, 2), torch.bfloat16)
    assert torch.equal(cuda.combine(outputs), torch.full((1, 64), 4.0).bfloat16())


@pytest.mark.parametrize("dim", [256, 2560])
def test_finish_in_one_node_has_the_residual_of_the_two_steps_and_their_norm(dim):
    outputs, weight = outputs_of(4, dim, True), torch.rand(dim).bfloat16()
    residual = torch.randn(4, dim + 8).bfloat16()[:, 4:-4]
    normed, stream = cuda.combine_add_rms_norm(outputs, residual, weight, 1e-6)
    combined = cuda.combine(outputs)
    assert torch.equal(stream, combined + residual)
    total = combined.double() + residual.double()
    want = total / torch.sqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert ((normed.double() - want).abs() <= 2**-8 * (1 + 1e-3) * want.abs() + 1e-30).all()
    for row in range(4):
        one = slice(row, row + 1)
        alone = ExpertOutputs(outputs.values[one].clone(), outputs.weights[one].clone(), outputs.dtype)
        got = cuda.combine_add_rms_norm(alone, residual[one].clone(), weight, 1e-6)
        assert same_bits(got[0], normed[one]) and same_bits(got[1], stream[one])


def test_refusals_name_their_reason():
    (experts, shared), (x, _, ids) = layer(), rows_of(2)
    assert cuda.why_not_experts(x, experts, shared, ids) is None
    assert "bf16, not torch.float32" in cuda.why_not_experts(x.float(), experts, shared, ids)
    assert "hidden size 128" in cuda.why_not_experts(x[:, :128], experts, shared, ids)
    assert "row major" in cuda.why_not_experts(x, experts._replace(w2=experts.w13.transpose(1, 2)), None, ids)
    shifted = torch.zeros(2, DIM + 8).bfloat16()[:, 4 : DIM + 4]
    assert "multiples of 16 bytes" in cuda.why_not_experts(shifted, experts, shared, ids)
    many = torch.zeros(161, 8, dtype=torch.int64)
    assert "161 rows of 8" in cuda.why_not_experts(x, experts, shared, many)
    assert "residual" in cuda.why_not_finish(x.float(), x[0])
