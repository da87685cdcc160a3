"""Norms, grouped top-k and SwiGLU in CUDA C++ against their references; emulated without a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from ops.kda_case import same_bits
from ops.swiglu_values import GATES, LIMITS, UPS, assert_same_function
from sgling_kernel.moe import cuda as moe_cuda
from sgling_kernel.moe import reference as moe_reference
from sgling_kernel.norm import cuda as norm_cuda
from sgling_kernel.norm import reference as norm_reference
from sgling_kernel.router import RouterConfig
from sgling_kernel.router import cuda as router_cuda
from sgling_kernel.router import reference as router_reference

pytestmark = pytest.mark.usefixtures("emulated_cuda")
EPS = 1e-6


def assert_one_rounding(got, want):
    """Half an ulp of the exact value (2^-8 relative), and a hair for the fp32 inside."""
    assert ((got.double() - want).abs() <= 2**-8 * (1 + 1e-3) * want.abs() + 1e-30).all()


def exact(x, weight):
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dim", [8, 64, 264, 512, 2560, 8192])
def test_norms_round_once_and_the_sum_is_normed_unrounded(dim):
    x, other = (torch.randn(3, dim + 8).mul(3).bfloat16()[:, 8:] for _ in range(2))
    weight = (torch.rand(dim) + 0.5).bfloat16()
    assert norm_cuda.why_not_rows(x, other, weight) is None
    assert_one_rounding(norm_cuda.rms_norm(x, weight, EPS), exact(x, weight))
    got, stream = norm_cuda.fused_add_rms_norm(x, other, weight, EPS)
    assert torch.equal(stream, norm_reference.fused_add_rms_norm(x, other, weight, EPS)[1])
    assert_one_rounding(got, exact(x.double() + other.double(), weight))


def test_a_normed_row_has_the_same_bits_alone_and_beside_any_other():
    x, weight = torch.randn(5, 512).bfloat16(), torch.rand(512).bfloat16()
    x[1], x[3] = math.nan, torch.randn(512) * 1e18
    normed, (added, stream) = norm_cuda.rms_norm(x, weight, EPS), norm_cuda.fused_add_rms_norm(x, x, weight, EPS)
    for row in range(5):
        one = x[row : row + 1].clone()
        assert same_bits(norm_cuda.rms_norm(one, weight, EPS), normed[row : row + 1])
        alone = norm_cuda.fused_add_rms_norm(one, one, weight, EPS)
        assert same_bits(alone[0], added[row : row + 1]) and same_bits(alone[1], stream[row : row + 1])


def test_norms_keep_more_dimensions_and_take_no_rows():
    x, weight = torch.randn(2, 3, 64).bfloat16(), torch.rand(64).bfloat16()
    assert same_bits(norm_cuda.rms_norm(x, weight, EPS), norm_cuda.rms_norm(x.view(6, 64), weight, EPS).view(2, 3, 64))
    assert norm_cuda.rms_norm(x[:0], weight, EPS).shape == (0, 3, 64)


def test_norms_say_why_they_refuse():
    x, weight = torch.zeros(2, 64).bfloat16(), torch.zeros(64).bfloat16()
    assert "not torch.float32" in norm_cuda.why_not_rows(x.float(), weight)
    assert "multiples of 8" in norm_cuda.why_not_rows(x[:, :60], weight)
    assert "16 bytes" in norm_cuda.why_not_rows(torch.zeros(2, 72).bfloat16()[:, 4:68], weight)
    assert "16 bytes" in norm_cuda.why_not_rows(torch.zeros(2, 68).bfloat16()[:, :64], weight)


CONFIGS = [
    (512, RouterConfig(8, 4, 8, True, 2.5)),  # the published model's sizes, a kernel of their own
    (512, RouterConfig(8, 4, 6, True, 2.5)),
    (128, RouterConfig(8, 4, 8, True, 2.5)),
    (32, RouterConfig(8, 4, 4, True, 2.5)),
    (64, RouterConfig(1, 1, 4, False, 1.0)),  # no groups
    (256, RouterConfig(4, 4, 32, True, 2.5)),  # every group kept
    (32, RouterConfig(32, 5, 3, True, 2.5)),  # one expert per group
    (32, RouterConfig(16, 2, 4, True, 2.5)),  # every expert of the kept groups chosen
]


@pytest.mark.parametrize(("experts", "config"), CONFIGS)
@pytest.mark.parametrize("levels", [None, 3])
def test_topk_chooses_and_weighs_as_the_reference_with_and_without_ties(experts, config, levels):
    if levels is None:
        logits, bias = torch.randn(9, experts) * 2, torch.randn(experts)
    else:  # few distinct logits and no bias: most choices are ties, between groups too
        logits, bias = torch.randint(levels, (9, experts)).float(), torch.zeros(experts)
    assert router_cuda.why_not(logits, bias, config) is None
    weights, ids = router_cuda.grouped_topk(logits, bias, config)
    want_weights, want_ids = router_reference.grouped_topk(logits, bias, config)
    assert ids.dtype == torch.int64 and ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights, want_weights)
    for row in (0, 8):
        alone = router_cuda.grouped_topk(logits[row : row + 1].clone(), bias, config)
        assert same_bits(alone[0], weights[row : row + 1]) and alone[1].tolist() == ids[row : row + 1].tolist()


def test_topk_with_masked_experts_negative_scores_and_vanishing_weights():
    config = RouterConfig(4, 2, 6, True, 2.5)
    logits, bias = torch.randn(4, 64), torch.full((64,), -3.0)  # all biased scores negative: dropped must lie below
    bias[5] = -torch.inf
    logits[1, :40] = -torch.inf
    logits[2] = -200.0
    logits[3, 16:] = -torch.inf
    bias[0:64:3] = -torch.inf
    weights, ids = router_cuda.grouped_topk(logits, bias, config)
    want_weights, want_ids = router_reference.grouped_topk(logits, bias, config)
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights, want_weights)
    assert weights[2].tolist() == [0.0] * 6


@pytest.mark.parametrize("top", [8, 6])
def test_topk_where_only_some_scores_are_equal_or_minus_infinity(top):
    config = RouterConfig(8, 4, top, True, 2.5)
    logits, bias = torch.randn(6, 512), torch.zeros(512)
    logits[0, 100:160] = 4.0  # equal scores at the top of three warps, two groups
    logits[1, 7], logits[1, 505] = 5.0, 5.0  # equal scores far apart
    logits[2, 64:128] = 3.0  # one group of equals
    logits[2, 128:192] = 3.0  # and another
    logits[3] = torch.randint(40, (512,)).float() / 8
    bias[torch.randperm(512)[:500]] = -torch.inf  # less than `top` left in most groups: dropped experts fill up by id
    logits[5] = 2.0
    for given in (torch.zeros(512), bias):
        weights, ids = router_cuda.grouped_topk(logits, given, config)
        want_weights, want_ids = router_reference.grouped_topk(logits, given, config)
        assert ids.tolist() == want_ids.tolist()
        torch.testing.assert_close(weights, want_weights)


def test_topk_of_rows_full_of_nan_stays_within_the_experts():
    _, ids = router_cuda.grouped_topk(torch.full((1, 512), math.nan), torch.zeros(512), CONFIGS[0][1])
    assert ((ids >= 0) & (ids < 512)).all()


def test_topk_says_why_it_refuses():
    config = RouterConfig(8, 4, 8, True, 2.5)
    assert "96 experts" in router_cuda.why_not(torch.zeros(1, 96), torch.zeros(96), config)
    assert "3 groups" in router_cuda.why_not(torch.zeros(1, 64), torch.zeros(64), config._replace(n_group=3))
    assert "contiguous" in router_cuda.why_not(torch.zeros(64, 2).t(), torch.zeros(64), config)


@pytest.mark.parametrize("limit", LIMITS)
def test_swiglu_of_special_values_is_the_reference(limit):
    gates = GATES[::127]
    gu = torch.stack(torch.broadcast_tensors(gates[:, None], UPS[None]), -1).flatten(1)
    assert_same_function(moe_cuda.swiglu(gu, limit), moe_reference.swiglu(gu, limit))


def test_swiglu_takes_strided_rows_and_says_why_it_refuses():
    gu = torch.randn(3, 48).bfloat16()
    assert_same_function(moe_cuda.swiglu(gu[:, 8:40], 4.0), moe_reference.swiglu(gu[:, 8:40], 4.0))
    assert moe_cuda.why_not_swiglu(gu[:, 8:40]) is None
    assert "16 bytes" in moe_cuda.why_not_swiglu(gu[:, 4:44])
    assert "multiple of 8" in moe_cuda.why_not_swiglu(gu[:, :36])
