"""The whole engine on the Triton kernels (interpreter, fp32): the ids of the plain torch operators, both rollbacks."""

from __future__ import annotations

import pytest
import torch

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.layers import linear, logits, moe
from sgling_kernel import dispatch
from spec.harness import Harness, random_prompt, request

LIMITS = {"expert_swiglu_limit_list": [0, 0, 0, 0.4], "share_expert_swiglu_limit_list": [0, 0, 0.5, 0.7]}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test/gpu runs the kernels themselves")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=4, **LIMITS)


def use_kernels(monkeypatch) -> None:
    """Every operator takes its Triton form, on weights in the layout a GPU gets."""
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    for module in (linear, logits, moe):
        monkeypatch.setattr(module, "pack_weight", lambda weight: weight)
    monkeypatch.setattr(moe, "empty_experts", lambda shape, dtype, device: torch.empty(shape, dtype=dtype))


def outcome(model_dir, **kwargs) -> dict[str, list[int]]:
    requests = [
        request("a", random_prompt(5, 1), max_new_tokens=3),
        request("b", random_prompt(3, 2), max_new_tokens=2),
    ]
    return {rid: outcome.ids for rid, outcome in Harness(model_dir, **kwargs).run(*requests).items()}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"speculative_algorithm": "none"},
        {"speculative_num_steps": 2},
        {"speculative_num_steps": 1, "linear_rollback": "staged"},
    ],
    ids=["plain", "replay", "staged"],
)
def test_kernels_give_the_ids_of_the_references(model_dir, monkeypatch, kwargs):
    expected = outcome(model_dir, speculative_algorithm="none")
    use_kernels(monkeypatch)
    assert outcome(model_dir, **kwargs) == expected
