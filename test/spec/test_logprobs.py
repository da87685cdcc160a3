"""Logprobs: one entry per committed token, equal with and without speculation, equal to the model's distribution."""

from __future__ import annotations

import math

import pytest
import torch

from model.tiny_model import write_tiny_checkpoint
from spec.harness import Harness, Oracle, random_prompt, request

PROMPT = random_prompt(21, seed=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=6)


@pytest.fixture(scope="module")
def plain(model_dir):
    return Harness(model_dir, speculative_algorithm="none").run(request("p", PROMPT, logprobs=3))["p"]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "frequency_penalty": 1.0, "logit_bias": {5: 3.0}}])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_logprobs_equal_those_of_plain_decoding(model_dir, params, width):
    wanted = request("p", PROMPT, logprobs=3, **params)
    truth = Harness(model_dir, speculative_algorithm="none").run(wanted)["p"]
    harness = Harness(model_dir, speculative_num_steps=width - 1)
    harness.use_drafter(Oracle(harness, {"p": (len(PROMPT), truth.ids)}, 512))
    outcome = harness.run(wanted)["p"]
    assert outcome.ids == truth.ids
    assert [entry.token_id for entry in outcome.logprobs] == outcome.ids
    for mine, theirs in zip(outcome.logprobs, truth.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    for mine, theirs in zip(outcome.top, truth.top, strict=True):
        assert [entry.token_id for entry in mine] == [entry.token_id for entry in theirs]


def test_every_token_has_its_own_entry_and_alternatives(plain):
    assert len(plain.logprobs) == len(plain.top) == len(plain.ids)
    for token, entry, top in zip(plain.ids, plain.logprobs, plain.top, strict=True):
        assert len(top) == 3
        assert top[0].token_id == token  # greedy
        assert entry.logprob == pytest.approx(top[0].logprob, abs=1e-6)
        assert sum(math.exp(alternative.logprob) for alternative in top) <= 1 + 1e-5


@pytest.mark.parametrize("chunk", [8, -1])
@pytest.mark.parametrize("start", [0, 5, 20])
def test_prompt_logprobs_cover_the_asked_tokens_whatever_the_chunks(model_dir, chunk, start):
    harness = Harness(model_dir, chunked_prefill_size=chunk)
    wanted = request("p", PROMPT, logprobs=0)
    wanted.logprob_start_len = start
    outcome = harness.run(wanted)["p"]
    assert [entry.token_id for entry in outcome.input_logprobs] == PROMPT[start:]
    reference = teacher_forced(harness, PROMPT)
    for index, entry in enumerate(outcome.input_logprobs, start):
        if index == 0:
            assert entry.logprob is None
        else:
            assert entry.logprob == pytest.approx(reference[index], abs=1e-4)


def test_prompt_logprobs_survive_the_retraction_of_a_half_read_prompt(model_dir):
    """Older requests outgrow the pool while a prompt is being read: it is swapped out and goes on where it stopped."""
    wanted = request("p", random_prompt(60, seed=9), logprobs=0, max_new_tokens=1)
    wanted.logprob_start_len = 0
    alone = Harness(model_dir, chunked_prefill_size=4).run(wanted)["p"]
    harness = Harness(model_dir, chunked_prefill_size=4, max_total_tokens=150)
    harness.send(*(request(f"old{i}", random_prompt(7, i), max_new_tokens=60) for i in range(2)))
    while harness.core.resources.kv.available > 62 + 3 * harness.core.resources.window:  # it still fits, just
        harness.step()
    outcome = harness.run(wanted)["p"]
    assert outcome.retractions == 1
    assert [entry.token_id for entry in outcome.input_logprobs] == wanted.input_ids
    assert outcome.input_logprobs == alone.input_logprobs


def test_an_empty_prompt_is_refused_by_the_scheduler_itself_even_with_prompt_logprobs(model_dir):
    wanted = request("p", [], logprobs=0)
    wanted.logprob_start_len = 0
    reason = Harness(model_dir).run(wanted)["p"].reason
    assert (reason.type, reason.status_code, reason.message) == ("abort", 400, "the prompt is empty")


def teacher_forced(harness: Harness, prompt: list[int]) -> list[float]:
    """Logprob of each prompt token given those before it: one generation step per prefix."""
    values = [float("nan")]
    for end in range(1, len(prompt)):
        wanted = request(f"t{end}", prompt[:end], logprobs=0, max_new_tokens=1)
        wanted.token_ids_logprob = [prompt[end]]
        collected = []
        harness.send(wanted)
        while harness.step():
            collected += [m for m in harness.messages if hasattr(m, "outputs")]
        entry = next(o for m in collected for o in m.outputs if o.rid == wanted.rid).logprobs
        values.append(entry.token_ids[0][0].logprob)
    return values


def test_requests_without_logprobs_are_undisturbed_by_neighbours_with(model_dir):
    alone = Harness(model_dir).run(request("a", PROMPT))["a"]
    both = Harness(model_dir).run(request("a", PROMPT), request("bb", random_prompt(30, seed=1), logprobs=5))
    assert both["a"].ids == alone.ids
    assert both["a"].logprobs == []
    assert torch.isfinite(torch.tensor([entry.logprob for entry in both["bb"].logprobs])).all()
