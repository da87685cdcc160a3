"""State parity through the engine: commit after any accept length leaves the state of token-by-token decoding.

With linears in fixed-row blocks a row's bits do not depend on how many rows ride along, so the comparison is exact:
KDA state, conv window, MLA KV and the relay are bit-equal to those of plain decoding at the same length.
"""

from __future__ import annotations

import pytest
import torch

from model.tiny_model import write_tiny_checkpoint
from sgling.training.generator.mix import PICO_DIR
from sgling_kernel.linear import PackedWeight
from sgling_kernel.moe import why_not_bags
from spec.harness import Harness, Oracle, random_prompt
from spec.states import EXACT, advance, plain_states, rounds_equal_to_plain

PROMPT = random_prompt(19, 1)
STEPS = 14


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2)


@pytest.fixture(scope="module")
def plain(model_dir):
    return plain_states(model_dir, PROMPT, 50)


@pytest.mark.parametrize("rollback", ["replay", "staged"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_state_after_every_commit_is_bit_equal_to_plain_decoding(model_dir, plain, rollback, width):
    harness = Harness(model_dir, speculative_num_steps=width - 1, linear_rollback=rollback, **EXACT)
    compare_with_plain(harness, *plain)


@pytest.mark.parametrize("rollback", ["replay", "staged"])
def test_state_of_the_embedded_model_is_bit_equal_under_packed_weights_and_expert_bags(rollback):
    states, ids = plain_states(PICO_DIR, PROMPT, 24)
    harness = Harness(PICO_DIR, speculative_num_steps=3, linear_rollback=rollback, context_length=512, **EXACT)
    model = harness.core.runner.model
    assert isinstance(model.logits_processor.weight, PackedWeight)
    experts = model.layers[1].mlp.experts
    assert why_not_bags(torch.zeros(1, model.config.hidden_size), experts.w13, experts.w2) is None
    compare_with_plain(harness, states, ids)


def compare_with_plain(harness: Harness, states: dict, ids: list[int]) -> None:
    """Rounds of every accept length in turn; before each, the state is that of plain decoding at the same length."""
    harness.use_drafter(Oracle(harness, {"r": (len(PROMPT), ids)}, 512))
    req = advance(harness, PROMPT, 1)
    compared = rounds_equal_to_plain(harness, req, states, STEPS)
    width = harness.core.runner.max_width
    assert compared > width, "too few rounds for every accept length"
    assert len(req.spec.accept_histogram) == width
    assert all(req.spec.accept_histogram), req.spec.accept_histogram
