"""The whole engine on the CUDA C++ kernels, emulated, in bf16: all speculation gives the ids of plain decoding.

This is the losslessness of the GPU suites on a CPU: every decode operator that has a CUDA form must serve, and a row
must not notice whether it is a decode step or one of a verify window.
"""

from __future__ import annotations

import pytest
import torch

from model.tiny_model import write_tiny_checkpoint
from sgling_kernel import dispatch
from spec.harness import Harness, random_drafter, random_prompt, request
from spec.test_triton_engine import use_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test/gpu runs the kernels themselves")

SHAPE = {  # sizes the CUDA forms are built for
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "intermediate_size": 64,
    "expert_swiglu_limit_list": [0, 0, 0, 0.4],
    "share_expert_swiglu_limit_list": [0, 0, 0.5, 0.7],
}
SERVING = {
    "linear.cuda",
    "linear.gated",
    "norm.cuda",
    "router.cuda",
    "moe.cuda",
    "moe.finish",
    "moe.swiglu",
    "kda.cuda",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), **SHAPE)


def outcome(model_dir, drafter=None, **kwargs) -> dict[str, list[int]]:
    harness = Harness(model_dir, dtype="bfloat16", **kwargs)
    harness.use_drafter(drafter)
    requests = [
        request("a", random_prompt(5, 1), max_new_tokens=4),
        request("b", random_prompt(3, 2), max_new_tokens=3, temperature=0.9, top_p=0.9),
    ]
    return {rid: outcome.ids for rid, outcome in harness.run(*requests).items()}


def test_speculation_changes_no_id(model_dir, emulated_cuda, monkeypatch):
    served, usable = set(), dispatch.usable

    def asked(path, reason):
        served.update([path] if reason is None else [])
        return usable(path, reason)

    use_kernels(monkeypatch)
    monkeypatch.setattr(dispatch, "usable", asked)
    expected = outcome(model_dir, speculative_algorithm="none")
    assert {rid: len(ids) for rid, ids in expected.items()} == {"a": 4, "b": 3}
    assert served >= SERVING, SERVING - served
    for kwargs in (
        {"speculative_num_steps": 2},
        {"speculative_num_steps": 3, "linear_rollback": "staged", "drafter": random_drafter(512)},
    ):
        assert outcome(model_dir, **kwargs) == expected, kwargs
