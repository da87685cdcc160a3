"""The whole engine on the Triton kernels (interpreter, fp32): the ids of the plain torch operators, both rollbacks."""

from __future__ import annotations

import pytest
import torch

from model.tiny_drafter import MLA, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.layers import linear, logits, moe
from sgling.srt.layers.attention import block_kv
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
    for module in (linear, logits, moe, block_kv):
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


@pytest.mark.parametrize("form", [{}, {**MLA, "rope_is_neox_style": False}], ids=["dense", "mla"])
def test_drafter_kernels_draft_what_the_references_draft(model_dir, tmp_path, monkeypatch, form):
    """Same accepted drafts, so the drafter's own kernels are held to their references too, not only the output."""
    drafter = write_tiny_drafter(tmp_path, block_size=3, target_layer_ids=[0, 2], num_target_layers=4, **form)
    kwargs = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(drafter)}
    drafted = []

    def run() -> tuple[dict, list]:
        harness = Harness(model_dir, **kwargs)
        worker = harness.scheduler.worker
        draft = worker.draft

        def recording(step):
            draft(step)
            drafted.append(worker.buffers.views(len(step.req_pool_indices), step.width).draft_tokens.tolist())

        worker.draft = recording
        outcomes = harness.run(request("a", random_prompt(5, 1), max_new_tokens=4))
        taken, drafted[:] = list(drafted), []
        return {rid: outcome.ids for rid, outcome in outcomes.items()}, taken

    expected = run()
    use_kernels(monkeypatch)
    assert run() == expected
