"""CUDA C++ experts, norms and routing on a GPU at one rank's sizes: values, row invariance, early starts, SwiGLU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.kda_case import same_bits
from ops.swiglu_values import GATES, LIMITS, UPS, assert_same_function
from sgling_kernel import cuda as runtime
from sgling_kernel import dispatch
from sgling_kernel.linear import cuda as linear_cuda
from sgling_kernel.moe import ExpertOutputs, ExpertWeights, cuda, reference
from sgling_kernel.moe import kernel as triton_kernel
from sgling_kernel.norm import cuda as norm_cuda
from sgling_kernel.norm import reference as norm_reference
from sgling_kernel.router import RouterConfig
from sgling_kernel.router import cuda as router_cuda
from sgling_kernel.router import reference as router_reference

DIM, WIDTH, EXPERTS, TOP = 2560, 192, 512, 8
ROWS = (1, 2, 6, 9, 17, 64, 160)
SECOND = Path(__file__).parent / "cuda" / "swiglu.cu"


@pytest.fixture(scope="module", autouse=True)
def _device():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device("cpu")


@pytest.fixture(scope="module")
def layer(_device):
    """One rank's experts and shared expert, with clamps that bind."""
    torch.manual_seed(0)

    def weights(*lead: int) -> tuple[torch.Tensor, torch.Tensor]:
        w13 = torch.randn(*lead, 2 * WIDTH, DIM, dtype=torch.bfloat16) * (2 / DIM**0.5)
        return w13, torch.randn(*lead, DIM, WIDTH, dtype=torch.bfloat16) / WIDTH**0.5

    return ExpertWeights(*weights(EXPERTS), 0.8), ExpertWeights(*weights(), 1.2)


def draw(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, ids), uniform routing."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, DIM, generator=generator).bfloat16()
    return x, torch.rand(rows, EXPERTS, generator=generator).topk(TOP).indices


@pytest.mark.parametrize("rows", ROWS)
def test_norm_and_router_in_one_node_have_the_bits_of_two(rows):
    x, residual = draw(rows, 1)[0], draw(rows, 2)[0]
    norm, w = torch.rand(DIM).bfloat16(), (torch.randn(EXPERTS, DIM) / DIM**0.5).bfloat16()
    normed, stream = norm_cuda.fused_add_rms_norm(x, residual, norm, 1e-6)
    want = normed, stream, linear_cuda.small_m_linear(normed, w, torch.float32)
    for share in range(1, 7):
        got = router_cuda.add_rms_norm_router(x, residual, norm, 1e-6, w, share)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), share


def slots_of(x: torch.Tensor, layer, ids: torch.Tensor, ctas: int | None = None) -> torch.Tensor:
    return cuda.down(cuda.up(x, *layer, ids, ctas), *layer, ids, ctas)


@pytest.mark.parametrize("rows", ROWS)
def test_slots_equal_fp64_products(layer, rows):
    (experts, shared), (x, ids) = layer, draw(rows, rows)
    got = slots_of(x, layer, ids)
    for row in range(0, rows, max(1, rows // 6)):
        sets = [(experts.w13[e], experts.w2[e], experts.limit) for e in ids[row]] + [shared]
        for slot, (w13, w2, limit) in enumerate(sets):
            hidden = reference.swiglu((w13.double() @ x[row].double()).float().bfloat16(), limit)
            want = w2.double() @ hidden.double()
            error = (got[row, slot].double() - want).norm() / want.norm()
            assert error < 3e-3, (row, slot, float(error))


@pytest.mark.parametrize("rows", ROWS)
def test_rows_have_their_own_bits_in_both_forms_over_many_draws(layer, rows):
    """fp32 outputs, so that no rounding hides a flip; alone is the CTA-per-pair form, together the walk."""
    for seed in range(12 if rows <= 17 else 2):
        x, ids = draw(rows, 1000 * rows + seed)
        if seed == 1:
            ids[:] = ids[:1]  # every row on the same experts: several tiles of tokens
        together = slots_of(x, layer, ids, 132)
        assert same_bits(slots_of(x, layer, ids, 0), together)
        assert same_bits(slots_of(x, layer, ids, 77), together)
        for row in range(rows):
            one = slice(row, row + 1)
            assert same_bits(slots_of(x[one].clone(), layer, ids[one].clone()), together[one])


def test_planted_neighbours_change_no_bit(layer):
    x, ids = draw(6, 5)
    clean = slots_of(x, layer, ids)
    x[4], ids[4] = float("nan"), ids[1]
    x[2] *= 1e30
    dirty = slots_of(x, layer, ids)
    keep = [0, 1, 3, 5]
    assert same_bits(dirty[keep], clean[keep])


@pytest.mark.parametrize("rows", [1, 6, 17])
def test_both_implementations_agree(layer, rows):
    x, ids = draw(rows, 3)
    weights = torch.rand(rows, TOP)
    got = cuda.combine(cuda.expert_outputs(x, *layer, weights, ids)).double()
    want = triton_kernel.experts_by_pair(x, *layer, weights, ids).double()
    assert (got - want).norm() / want.norm() < 5e-3


def layer_node(layer, x, residual, router, weight):
    """A whole MoE layer behind its router product, to the next norm."""
    logits, bias = router
    weights, ids = router_cuda.grouped_topk(logits, bias, RouterConfig(8, 4, TOP, True, 2.5))
    outputs = cuda.expert_outputs(x, *layer, weights, ids)
    return cuda.combine_add_rms_norm(outputs, residual, weight, 1e-6)


@pytest.mark.parametrize("rows", [1, 6, 17])
def test_early_starts_change_no_bit_in_a_chain_of_layers(layer, rows):
    """Twelve layers in one graph, each fed by the one before; ids and weights of a layer are read before its wait."""
    torch.manual_seed(rows)
    projection, bias = torch.randn(DIM, EXPERTS) / DIM**0.5, torch.randn(EXPERTS) * 0.1
    start, weight = torch.randn(rows, DIM, dtype=torch.bfloat16), torch.ones(DIM, dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        hidden, stream = norm_cuda.rms_norm(start, weight, 1e-6), start
        for _ in range(12):
            hidden, stream = layer_node(layer, hidden, stream, (hidden.float() @ projection, bias), weight)
        return torch.stack((hidden, stream))

    dispatch.set_kernel_switches(pdl=False)
    strict = chain().clone()
    dispatch.set_kernel_switches()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        early = chain()
    for _ in range(50):
        graph.replay()
        assert same_bits(early, strict)


@pytest.mark.parametrize("rows", [1, 6, 17, 160])
def test_ctas_of_a_row_change_no_bit_of_the_finish(rows):
    outputs = ExpertOutputs(torch.randn(rows, TOP + 1, DIM), torch.rand(rows, TOP), torch.bfloat16)
    residual, weight = torch.randn(rows, DIM).bfloat16(), torch.rand(DIM).bfloat16()
    outputs.values[-1, 2, 7] = float("nan")
    combined = cuda.combine(outputs, 1)
    finished = cuda.combine_add_rms_norm(outputs, residual, weight, 1e-6, 1)
    for ctas in (2, 4, 5):
        assert same_bits(cuda.combine(outputs, ctas), combined)
        for _ in range(20):
            again = cuda.combine_add_rms_norm(outputs, residual, weight, 1e-6, ctas)
            assert all(same_bits(*pair) for pair in zip(again, finished, strict=True))


@pytest.mark.parametrize("rows", [1, 17, 160])
def test_finish_and_norms(rows):
    torch.manual_seed(rows)
    outputs = ExpertOutputs(torch.randn(rows, TOP + 1, DIM), torch.rand(rows, TOP), torch.bfloat16)
    residual, weight = torch.randn(rows, DIM).bfloat16(), torch.rand(DIM).bfloat16()
    combined = cuda.combine(outputs)
    torch.testing.assert_close(combined.float(), reference.combine(outputs).float(), atol=0.05, rtol=2**-7)
    assert (combined != reference.combine(outputs)).float().mean() < 0.02
    normed, stream = cuda.combine_add_rms_norm(outputs, residual, weight, 1e-6)
    two_steps = norm_cuda.fused_add_rms_norm(combined, residual, weight, 1e-6)
    assert torch.equal(stream, two_steps[1])
    for got, want in (
        (normed, norm_reference.fused_add_rms_norm(combined, residual, weight, 1e-6)[0]),
        (two_steps[0], norm_reference.fused_add_rms_norm(combined, residual, weight, 1e-6)[0]),
        (norm_cuda.rms_norm(residual, weight, 1e-6), norm_reference.rms_norm(residual, weight, 1e-6)),
    ):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=2**-7)
    for row in range(0, rows, max(1, rows // 8)):
        one = slice(row, row + 1)
        alone = ExpertOutputs(outputs.values[one].clone(), outputs.weights[one].clone(), outputs.dtype)
        got = cuda.combine_add_rms_norm(alone, residual[one].clone(), weight, 1e-6)
        assert same_bits(got[0], normed[one]) and same_bits(got[1], stream[one])


@pytest.mark.parametrize("levels", [None, 5])
def test_topk_of_many_rows(levels):
    config = RouterConfig(8, 4, TOP, True, 2.5)
    torch.manual_seed(1)
    if levels is None:
        logits, bias = torch.randn(4000, EXPERTS) * 2, torch.randn(EXPERTS) * 0.1
    else:
        logits, bias = torch.randint(levels, (4000, EXPERTS)).float(), torch.zeros(EXPERTS)
        logits[::7, 64:300] = -torch.inf
    weights, ids = router_cuda.grouped_topk(logits, bias, config)
    want_weights, want_ids = router_reference.grouped_topk(logits, bias, config)
    same = (ids == want_ids).all(1)  # two sigmoids that round apart may swap a pair of near-equal experts
    assert bool(same.all()) if levels else float(same.float().mean()) > 0.999
    torch.testing.assert_close(weights[same], want_weights[same])


@pytest.mark.parametrize("limit", LIMITS)
def test_swiglu_of_every_gate_and_64_ups(limit):
    """65,536 x 64 pairs against the specification, and against the formula written down a second time."""
    pairs = torch.stack(torch.broadcast_tensors(GATES.cuda()[:, None], UPS.cuda()[None]), -1)
    got = cuda.swiglu(pairs.flatten(1), limit)
    assert got.shape == (65536, 64)
    second = torch.empty_like(got)
    runtime.launch(runtime.function(SECOND, "second_swiglu"), second, pairs, got.numel(), float(limit or 0))
    assert_same_function(got, reference.swiglu(pairs.flatten(1), limit))
    assert_same_function(got, second)
    assert_same_function(triton_kernel.swiglu(pairs.flatten(1), limit), second)
