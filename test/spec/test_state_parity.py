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
from spec.harness import Harness, Oracle, random_prompt, request

PROMPT = random_prompt(19, 1)
STEPS = 14


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=2)


def run_until_decoded(harness: Harness, count: int):
    """Step until the request has ``count`` committed output tokens; returns its request object."""
    harness.send(request("r", PROMPT, max_new_tokens=60))
    while True:
        harness.step()
        running = harness.core.decode.running
        if running and len(running[0].output_ids) >= count:
            return running[0]


def snapshot(harness: Harness, req) -> dict[str, torch.Tensor]:
    """Device state of a request up to its committed length."""
    runner = harness.core.runner
    length = int(runner.future.new_seq_lens[req.req_pool_idx])
    slots = runner.pools.req_to_token[req.req_pool_idx, :length]
    return {
        "length": torch.tensor(length),
        "bonus": runner.future.output_tokens[req.req_pool_idx].clone(),
        "conv": runner.pools.state.conv[:, req.state_slot].clone(),
        "temporal": runner.pools.state.temporal[:, req.state_slot].clone(),
        "kv": runner.pools.kv.buffer[:, slots].clone(),
    }


@pytest.fixture(scope="module")
def plain(model_dir):
    return plain_states(model_dir, 50)


def plain_states(model_dir, count: int):
    """State of plain decoding after each output token, by committed length; and the output."""
    harness = exact(model_dir, speculative_algorithm="none")
    req = run_until_decoded(harness, 1)
    states = {}
    while len(req.output_ids) < count:
        state = snapshot(harness, req)
        states[int(state["length"])] = state
        harness.step()
    return states, list(req.output_ids)


def exact(model_dir, **kwargs) -> Harness:
    return Harness(model_dir, enable_deterministic_inference=True, disable_overlap_schedule=True, **kwargs)


@pytest.mark.parametrize("rollback", ["replay", "staged"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_state_after_every_commit_is_bit_equal_to_plain_decoding(model_dir, plain, rollback, width):
    harness = exact(model_dir, speculative_num_steps=width - 1, linear_rollback=rollback)
    compare_with_plain(harness, *plain)


@pytest.mark.parametrize("rollback", ["replay", "staged"])
def test_state_of_the_embedded_model_is_bit_equal_under_packed_weights_and_expert_bags(rollback):
    states, ids = plain_states(PICO_DIR, 24)
    harness = exact(PICO_DIR, speculative_num_steps=3, linear_rollback=rollback, context_length=512)
    model = harness.core.runner.model
    assert isinstance(model.logits_processor.weight, PackedWeight)
    experts = model.layers[1].mlp.experts
    assert why_not_bags(torch.zeros(1, model.config.hidden_size), experts.w13, experts.w2) is None
    compare_with_plain(harness, states, ids)


def compare_with_plain(harness: Harness, states: dict, ids: list[int]) -> None:
    """Rounds of every accept length in turn; before each, the state is that of plain decoding at the same length."""
    harness.use_drafter(Oracle(harness, {"r": (len(PROMPT), ids)}, 512))
    req = run_until_decoded(harness, 1)
    for _ in range(STEPS):
        state = snapshot(harness, req)
        length = int(state["length"])
        if length not in states:
            break
        for name, value in state.items():
            assert torch.equal(value, states[length][name]), (name, length)
        harness.step()
    assert set(req.spec.accept_histogram) != {0}
