"""An MoE layer whose sum over experts the next norm finishes: one rank leaves it open, several ranks do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgling.srt.layers.moe import SparseMoE
from sgling.srt.layers.norm import RMSNorm
from sgling_kernel.moe import ExpertOutputs, ExpertWeights, reference
from sgling_kernel.norm import reference as norm_reference
from sgling_kernel.router import reference as router_reference

HIDDEN, WIDTH, EXPERTS, ROWS = 256, 64, 32, 5
CONFIG = SimpleNamespace(
    n_group=8, topk_group=4, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=True,
    routed_scaling_factor=2.5, hidden_size=HIDDEN, moe_intermediate_size=WIDTH,
    routed_limit=lambda layer: 0.5, shared_limit=lambda layer: 0.8,
)  # fmt: skip


class Ranks:
    """A group of ``size`` ranks that all hold the same: the sum is ``size`` times one's own."""

    def __init__(self, size: int):
        self.size = size

    def shard(self, length: int) -> tuple[int, int]:
        return 0, length

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return x * self.size


class RandomSource:
    """Weights by name, the same ones every time."""

    dtype, device = torch.bfloat16, "cpu"

    def __init__(self, size: int):
        self.parallel = Ranks(size)

    def full(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        shapes = {"bias": (EXPERTS,), "gate.weight": (EXPERTS, HIDDEN), "down_proj.weight": (HIDDEN, WIDTH)}
        shape = next((shape for end, shape in shapes.items() if name.endswith(end) and "norm" not in name), None)
        shape = shape or ((HIDDEN,) if "norm" in name else (WIDTH, HIDDEN))
        generator = torch.Generator().manual_seed(sum(name.encode()))
        return (torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5).to(dtype or self.dtype)

    def shard(self, name: str, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.full(name, dtype)


def specified(moe: SparseMoE, norm: RMSNorm, x: torch.Tensor, stream: torch.Tensor, size: int):
    x, stream, logits = router_reference.add_rms_norm_router(x, stream, norm.weight, norm.eps, moe.gate)
    weights, ids = router_reference.grouped_topk(logits, moe.expert_bias, moe.router)
    routed = reference.moe_experts(x, *moe.experts[:2], weights, ids, moe.experts.limit)
    out = (routed + reference.dense_ffn(x, *moe.shared)) * size
    return norm_reference.fused_add_rms_norm(out, stream, norm.weight, norm.eps)


@pytest.mark.parametrize("size", [1, 2])
def test_the_next_norm_finishes_the_sum_over_experts_of_one_rank(emulated_cuda, size):
    source = RandomSource(size)
    moe, norm = SparseMoE(source, "mlp", CONFIG, 0), RMSNorm(source, "norm.weight", 1e-6)
    w13, w2, limit = moe.experts
    moe.experts = ExpertWeights(w13.contiguous(), w2.contiguous(), limit)  # as they lie on a GPU
    x, stream = torch.randn(ROWS, HIDDEN).bfloat16(), torch.randn(ROWS, HIDDEN).bfloat16()
    outputs, new_stream = moe.forward_add(x, stream, norm)
    assert isinstance(outputs, ExpertOutputs) == (size == 1)
    for got, want in zip(norm.forward_add(outputs, new_stream), specified(moe, norm, x, stream, size), strict=True):
        torch.testing.assert_close(got.float(), want.float(), atol=0.03, rtol=2**-6)
        assert (got - want).norm() < 5e-3 * want.norm()


def test_a_decode_without_cuda_kernels_has_nothing_to_finish():
    source = RandomSource(1)
    moe, norm = SparseMoE(source, "mlp", CONFIG, 0), RMSNorm(source, "norm.weight", 1e-6)
    x, stream = torch.randn(ROWS, HIDDEN).bfloat16(), torch.randn(ROWS, HIDDEN).bfloat16()
    outputs, new_stream = moe.forward_add(x, stream, norm)
    assert isinstance(outputs, torch.Tensor)
    got = norm.forward_add(outputs, new_stream)[0]
    torch.testing.assert_close(got.float(), specified(moe, norm, x, stream, 1)[0].float(), atol=0.03, rtol=2**-6)
