"""Stops, limits and aborts inside an accepted run end a request exactly where plain decoding ends it."""

from __future__ import annotations

import pytest

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.managers.io_struct import AbortReq
from spec.harness import Harness, Oracle, random_prompt, request

VOCAB = 512
PROMPT = random_prompt(17, seed=5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=4)


@pytest.fixture(scope="module")
def plain_ids(model_dir):
    harness = Harness(model_dir, speculative_algorithm="none")
    return harness.run(request("plain", PROMPT, max_new_tokens=48))["plain"].ids


@pytest.fixture(scope="module")
def harness(model_dir):
    return Harness(model_dir, speculative_num_steps=7)


def run(harness: Harness, plain_ids: list[int], rid: str, **params):
    """One request whose drafts are always right: runs of eight tokens."""
    truth = {rid: (len(PROMPT), plain_ids)}
    oracle = Oracle(harness, truth, VOCAB)
    oracle.turn = -1_000_000

    def perfect(worker, step):
        oracle.turn = step.width * 1000 - len(step.req_pool_indices) + step.width - 1
        oracle(worker, step)

    harness.use_drafter(perfect)
    return harness.run(request(rid, PROMPT, **params))[rid]


def first_use(ids: list[int], index: int) -> bool:
    """Whether the token at ``index`` has not occurred before, so that it can serve as a stop."""
    return ids[index] not in ids[:index]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 10, 15, 16, 17, 40])
def test_length_limit_is_exact_at_every_offset_of_a_run(harness, plain_ids, limit):
    outcome = run(harness, plain_ids, f"limit{limit}", max_new_tokens=limit)
    assert outcome.ids == plain_ids[:limit]
    assert (outcome.reason.type, outcome.reason.length) == ("length", limit)


def test_zero_new_tokens_is_a_prefill_only_request(harness, plain_ids):
    outcome = run(harness, plain_ids, "zero", max_new_tokens=0)
    assert outcome.ids == []
    assert outcome.reason.type == "length"


@pytest.mark.parametrize("index", range(20))
@pytest.mark.parametrize("margin", [0, 1, 5])
def test_stop_token_inside_the_budget_wins_over_the_length(harness, plain_ids, index, margin):
    if not first_use(plain_ids, index):
        index = max(i for i in range(index) if first_use(plain_ids, i))
    limit = index + 1 + margin
    stop = plain_ids[index]
    outcome = run(harness, plain_ids, f"s{index}-{margin}", max_new_tokens=limit, stop_token_ids=[stop])
    assert outcome.ids == plain_ids[: index + 1]
    assert (outcome.reason.type, outcome.reason.matched) == ("stop", stop)


def test_stop_token_behind_the_limit_is_a_length_finish(harness, plain_ids):
    index = max(i for i in range(12) if first_use(plain_ids, i))
    stop = [plain_ids[index]]
    outcome = run(harness, plain_ids, "behind", max_new_tokens=index, stop_token_ids=stop)
    assert outcome.ids == plain_ids[:index]
    assert outcome.reason.type == "length"


def test_eos_ends_a_run_and_ignore_eos_does_not(model_dir, plain_ids):
    index = max(i for i in range(20) if first_use(plain_ids, i))
    eos = plain_ids[index]
    harness = Harness(model_dir, speculative_num_steps=7, json_model_override_args={"eos_token_id": eos})
    stopped = run(harness, plain_ids, "eos", max_new_tokens=40, ignore_eos=False)
    assert stopped.ids == plain_ids[: index + 1]
    assert (stopped.reason.type, stopped.reason.matched) == ("stop", eos)
    assert run(harness, plain_ids, "ignored", max_new_tokens=40).ids == plain_ids[:40]


@pytest.mark.parametrize("after", range(6))
def test_abort_ends_at_once_and_neighbours_are_untouched(model_dir, plain_ids, after):
    harness = Harness(model_dir, speculative_num_steps=3)
    harness.send(
        request("victim", random_prompt(9, seed=1), max_new_tokens=200), request("other", PROMPT, max_new_tokens=48)
    )
    for _ in range(after):
        harness.step()
    harness.send(AbortReq(rid="victim"))
    outcomes = harness.run()
    assert outcomes["victim"].reason.type == "abort"
    assert outcomes["other"].ids == plain_ids


def test_abort_between_two_prefill_chunks(model_dir, plain_ids):
    harness = Harness(model_dir, chunked_prefill_size=16)
    harness.send(request("long", random_prompt(200, seed=2)))
    for _ in range(3):
        harness.step()
    harness.send(AbortReq(rid="long"), request("next", PROMPT, max_new_tokens=48))
    outcomes = harness.run()
    assert outcomes["long"].reason.type == "abort"
    assert outcomes["next"].ids == plain_ids


def test_abort_of_an_unknown_request_is_harmless(harness):
    harness.run(AbortReq(rid="nobody"))
