"""Conformance 1 to 3 (docs/dspark.md §8): training form = cached form, no leak of the future, row alignment."""

from __future__ import annotations

import pytest
import torch

from model.tiny_drafter import MLA, drafter_config, drafter_tensors, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.dspark_config import DSparkConfig
from spec import dspark_reference
from spec.dspark_harness import VOCAB, InjectedFeatures, block_outputs, dspark, step_of, target_taps
from spec.harness import Harness, Oracle, random_prompt, request
from spec.states import advance

PROMPT = random_prompt(37, 1)
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
FORMS = {
    "dense": {},
    "dense interleaved": {"rope_is_neox_style": False},
    "dense partial rope": {"partial_rotary_factor": 0.5},
    "dense multi-head": {"num_key_value_heads": 4},
    "mla": MLA,
    "mla interleaved": {**MLA, "rope_interleave": True, "rope_is_neox_style": None},
    "sliding": SLIDING,
    "sliding mla": {**MLA, **SLIDING},
    "sliding, whole block": {**SLIDING, "is_causal": False},
    "no anchor row": {"sample_from_anchor": False},
    "embedding tap": {"target_layer_ids": [-1, 1]},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def plain_ids(target):
    return Harness(target, speculative_algorithm="none").run(request("r", PROMPT, max_new_tokens=200))["r"].ids


def parameters(**overrides):
    raw = drafter_config(**overrides)
    return DSparkConfig.from_dict(raw), {name: value.float() for name, value in drafter_tensors(raw).items()}


def embedding_of(harness: Harness) -> torch.Tensor:
    return harness.core.runner.model.embed_tokens.weight


@pytest.mark.parametrize("form", FORMS)
def test_1_cached_block_equals_the_training_form(target, tmp_path, plain_ids, form):
    """The context is built by three prefill chunks and by verifies of every accept length."""
    overrides = {"block_size": 8, **FORMS[form]}
    harness = dspark(target, write_tiny_drafter(tmp_path, **overrides), chunked_prefill_size=16)
    harness.use_drafter(Oracle(harness, {"r": (len(PROMPT), plain_ids)}, VOCAB))
    features = InjectedFeatures(harness)
    config, params = parameters(**overrides)
    req = advance(harness, PROMPT, 1)
    for count in (1, 12, 40):
        while len(req.output_ids) < count:
            harness.step()
        anchor = int(harness.core.runner.future.new_seq_lens[req.req_pool_idx])
        ids = torch.tensor([*PROMPT, *plain_ids])[: anchor + 1]
        expected = dspark_reference.block_hidden(
            params, config, features.up_to(anchor), ids, torch.tensor([anchor]), embedding_of(harness)
        )[0]
        torch.testing.assert_close(block_outputs(harness, req), expected, atol=1e-5, rtol=1e-4)


def test_1_injected_features_are_those_of_a_clean_prefill(target, tmp_path):
    harness = dspark(target, write_tiny_drafter(tmp_path), chunked_prefill_size=16)
    features = InjectedFeatures(harness)
    req = advance(harness, PROMPT, 10)
    length = int(harness.core.runner.future.new_seq_lens[req.req_pool_idx])
    clean = target_taps(target, (0, 2, 3), [*PROMPT, *req.output_ids, 0, 0, 0, 0, 0][:length])
    known = len(PROMPT) + len(req.output_ids) - 1  # the overlapped loop is one step ahead of the host
    torch.testing.assert_close(features.up_to(length)[:known], clean[:known], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_1_markov_chain_and_confidence_equal_the_training_form(target, tmp_path, kind):
    overrides = {"block_size": 6, "markov_head_type": kind}
    harness = dspark(target, write_tiny_drafter(tmp_path, **overrides))
    req = advance(harness, PROMPT, 4)
    config, params = parameters(**overrides)
    step, worker = step_of(harness, req), harness.scheduler.worker
    with torch.inference_mode():
        hidden = block_outputs(harness, req)[None]
        worker.draft(step)
        drafts = worker.buffers.views(1, step.width).draft_tokens.clone()
        anchor = harness.core.runner.future.output_tokens[req.req_pool_idx]
        previous = torch.cat((anchor.view(1, 1), drafts[:, :-1]), -1)
        head = harness.core.runner.model.logits_processor.weight
        logits = hidden @ head.T + dspark_reference.markov_bias(params, config, hidden, previous)
        assert torch.equal(logits.argmax(-1), drafts)
        expected = dspark_reference.confidence(params, config, hidden, previous)
        raw = worker.drafter.confidence.forward(hidden, worker.drafter.markov.embed(previous))
    torch.testing.assert_close(raw, expected, atol=1e-5, rtol=1e-4)


@pytest.fixture
def running(target, tmp_path):
    """A request in the middle of its answer, and its newest block."""
    harness = dspark(target, write_tiny_drafter(tmp_path, block_size=8), disable_overlap_schedule=True)
    req = advance(harness, PROMPT, 9)
    return harness, req, block_outputs(harness, req)


def test_2_entries_behind_the_committed_length_have_no_effect(running):
    harness, req, clean = running
    runner = harness.core.runner
    length = int(runner.future.new_seq_lens[req.req_pool_idx])
    behind = runner.pools.req_to_token[req.req_pool_idx, length : len(req.kv_slots)]
    with torch.inference_mode():
        runner.pools.draft_kv.buffer[:, behind] = torch.nan
    assert torch.equal(block_outputs(harness, req), clean)


def test_2_anchor_and_last_feature_move_the_block(running):
    harness, req, clean = running
    runner = harness.core.runner
    row, length = req.req_pool_idx, int(runner.future.new_seq_lens[req.req_pool_idx])
    with torch.inference_mode():
        runner.future.output_tokens[row] += 1
        assert not torch.equal(block_outputs(harness, req), clean)
        runner.future.output_tokens[row] -= 1
        last = runner.pools.req_to_token[row, length - 1]
        runner.pools.draft_kv.buffer[:, last] *= 1.5
    assert not torch.equal(block_outputs(harness, req), clean)


def test_2_training_form_does_not_see_the_feature_at_the_anchor_or_later(target):
    config, params = parameters(block_size=8)
    ids = torch.tensor(random_prompt(60, 5))
    taps = target_taps(target, config.target_layer_ids, ids.tolist())
    anchors, embedding = torch.tensor([20, 33]), torch.randn(VOCAB, 64)

    def block(taps, ids):
        return dspark_reference.block_hidden(params, config, taps, ids, anchors, embedding)

    clean, moved = block(taps, ids), taps.clone()
    moved[33:] += 1.0
    assert torch.equal(block(moved, ids), clean)
    moved[32] += 1.0
    changed = block(moved, ids)
    assert torch.equal(changed[0], clean[0]) and not torch.equal(changed[1], clean[1])


@pytest.mark.parametrize("size", [1, 3, 8, 16])
@pytest.mark.parametrize("anchor_row", [True, False])
def test_3_a_drafter_that_knows_the_answer_is_accepted_in_full_every_step(
    target, tmp_path, plain_ids, size, anchor_row
):
    """Row k of the block is given the teacher's logits of position P + k + 1: any shift of rows loses drafts."""
    directory = write_tiny_drafter(tmp_path, block_size=size, sample_from_anchor=anchor_row, markov_rank=0,
                                   markov_head_type=None, confidence_head_with_markov=False)  # fmt: skip
    harness = dspark(target, directory)
    worker, future = harness.scheduler.worker, harness.core.runner.future

    def teacher(hidden):
        (req,) = harness.core.decode.running
        first = int(future.new_seq_lens[req.req_pool_idx]) + 1 - len(PROMPT)
        wanted = torch.tensor([plain_ids[first + k] if first + k < len(plain_ids) else 0 for k in range(len(hidden))])
        return torch.nn.functional.one_hot(wanted, VOCAB).float()

    worker.drafter.logits = teacher
    outcome = harness.run(request("r", PROMPT, max_new_tokens=100))["r"]
    assert outcome.ids == plain_ids[:100]
    histogram = outcome.spec.accept_histogram
    assert histogram[-1] >= sum(histogram) - 1, histogram
