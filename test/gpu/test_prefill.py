"""GPU prefill: the library's chunk kernel and flash attention against the plain torch operators."""

from __future__ import annotations

import pytest
import torch

from ops.kda_case import make_params, make_pools, make_rows
from sgling_kernel.kda import KDAParams, chunk_configs, gpu, reference
from sgling_kernel.mla import gpu as mla_gpu
from sgling_kernel.mla import reference as mla_reference
from sgling_kernel.moe import ExpertWeights, by_expert
from sgling_kernel.moe import gpu as moe_gpu
from sgling_kernel.moe import reference as moe_reference

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _device():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device("cpu")


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the whole tensor."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("prefix", [0, 77])
def test_expanded_attention(prefix):
    heads, nope, rope, latent, v_dim, tokens = 8, 128, 64, 512, 128, 300
    q, kv = torch.randn(tokens, heads, nope + rope).to(BF16), torch.randn(prefix + tokens, latent + rope).to(BF16)
    w_kc = (torch.randn(heads, nope, latent) / latent**0.5).to(BF16)
    w_vc = (torch.randn(heads, latent, v_dim) / latent**0.5).to(BF16)
    args = (q, kv, w_kc, w_vc, prefix, 0.07)
    assert error(mla_gpu.mla_prefill(*args), mla_reference.mla_prefill(*args)) < 1e-2


def test_grouped_experts():
    experts = ExpertWeights((torch.randn(16, 64, 256) / 16).to(BF16), (torch.randn(16, 256, 32) / 6).to(BF16), 0.5)
    x, weights, ids = torch.randn(300, 256).to(BF16), torch.rand(300, 4), torch.randint(0, 16, (300, 4))
    want = moe_reference.moe_experts(x, experts.w13, experts.w2, weights, ids, experts.limit)
    routed = moe_gpu.experts_grouped(x, experts, weights, ids)
    assert error(routed, want) < 1e-2
    beside = torch.randn(300, 256).to(BF16)
    assert torch.equal(moe_gpu.experts_grouped(x, experts, weights, ids, beside), routed + beside)


@pytest.mark.parametrize(("rows", "experts"), [(161, 256), (8192, 256), (40000, 64)])
def test_places_of_whole_chunks_are_those_of_a_stable_sort(rows, experts):
    ids = torch.rand(rows, experts).topk(8).indices
    place, ends = by_expert.places(ids, experts)
    order = ids.flatten().argsort(stable=True)
    assert torch.equal(place.flatten()[order], torch.arange(rows * 8))
    assert torch.equal(ends.long(), ids.flatten().bincount(minlength=experts).cumsum(0))


def test_chunk_kda_and_the_hand_over_between_chunks():
    pytest.importorskip("fla")
    assert chunk_configs.fix_configs()
    params, rows = make_params(8, 128), make_rows(200, 8, 128, BF16)
    pools = make_pools(1, 2, 8, 128, BF16)
    slot = torch.tensor([1])
    assert gpu.why_not_chunk_kda(rows.qkv, params) is None
    whole, pieces, stepped = pools.clone(), pools.clone(), pools.clone()
    out = gpu.kda_extend(*rows, KDAParams(*params), *whole.layer(0), slot)
    want = reference.kda_extend(*rows, params, *stepped.layer(0), slot)
    assert torch.equal(whole.conv, stepped.conv)
    assert error(out, want) < 2e-2 and error(whole.state[0, 1], stepped.state[0, 1]) < 2e-2
    assert torch.equal(whole.state[0, 0], pools.state[0, 0]), "another slot's state"
    parts = [
        gpu.kda_extend(*rows.pick(part), params, *pieces.layer(0), slot) for part in (slice(0, 130), slice(130, 200))
    ]
    assert torch.equal(pieces.conv, stepped.conv)
    assert error(torch.cat(parts), want) < 2e-2 and error(pieces.state[0, 1], stepped.state[0, 1]) < 2e-2
    for name in chunk_configs.CONFIGS:
        tuner = chunk_configs.autotuner(name)
        assert len(tuner.configs) == 1 and not tuner.cache, f"{name} was tuned at run time"
