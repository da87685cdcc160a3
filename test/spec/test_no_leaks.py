"""500 mixed requests with aborts, stops, limits and retraction: nothing leaks, neighbours are served, counts agree."""

from __future__ import annotations

import random

import pytest

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.managers.io_struct import AbortReq
from sgling.srt.mem_cache.allocator import OutOfSlotsError, SlotAllocator, TokenToKVPoolAllocator
from spec.harness import Harness, random_prompt, request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


def mixed_request(rng: random.Random, index: int):
    params = {"max_new_tokens": rng.choice([0, 1, 2, 5, 9, 33, 40])}
    kind = rng.randrange(5)
    if kind == 1:
        params |= {"temperature": rng.uniform(0.2, 2.0), "top_p": 0.9}
    elif kind == 2:
        params |= {"stop_token_ids": rng.sample(range(4, 512), 120)}
    elif kind == 3:
        params |= {"frequency_penalty": 1.0, "logit_bias": {rng.randrange(512): 5.0}}
    elif kind == 4:
        params |= {"ignore_eos": False, "min_new_tokens": 1}
        params["max_new_tokens"] = max(1, params["max_new_tokens"])
    prompt = random_prompt(rng.randrange(1, 40), index)
    return request(f"req{index}", prompt, logprobs=2 if index % 7 == 0 else None, **params)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_mixed_traffic_leaves_everything_free(model_dir, page_size, overlap):
    rng = random.Random(page_size)
    harness = Harness(
        model_dir,
        max_running_requests=6,
        max_total_tokens=128,
        page_size=page_size,
        chunked_prefill_size=16,
        disable_overlap_schedule=not overlap,
    )
    before = (harness.core.resources.kv.available, harness.core.resources.rows.available)
    total = 125  # four variants: 500 requests
    for index in range(total):
        harness.send(mixed_request(rng, index))
        for _ in range(rng.randrange(3)):
            harness.step()
        if rng.random() < 0.15:
            harness.send(AbortReq(rid=f"req{rng.randrange(index + 1)}"))
    outcomes = harness.run()
    assert len(outcomes) == total
    assert all(outcome.reason is not None for outcome in outcomes.values())
    assert {outcome.reason.type for outcome in outcomes.values()} == {"stop", "length", "abort"}
    assert harness.core.decode.num_retracted > 0
    assert (harness.core.resources.kv.available, harness.core.resources.rows.available) == before


def test_abort_of_everything_frees_everything(model_dir):
    harness = Harness(model_dir, chunked_prefill_size=8)
    harness.send(*(request(f"r{i}", random_prompt(30, i), max_new_tokens=300) for i in range(9)))
    for _ in range(12):
        harness.step()
    outcomes = harness.run(AbortReq(abort_all=True))
    assert {outcome.reason.type for outcome in outcomes.values()} == {"abort"}
    assert len(outcomes) == 9


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_aborted_half_read_is_never_swapped_out_when_kv_runs_short_in_the_same_step(
    model_dir, monkeypatch, overlap
):
    harness = Harness(
        model_dir, max_total_tokens=200, chunked_prefill_size=8, disable_overlap_schedule=not overlap
    )  # fmt: skip
    harness.send(*(request(f"r{i}", random_prompt(4, i), max_new_tokens=40) for i in range(3)))
    while len(harness.core.decode.running) < 3:
        harness.step()
    harness.send(request("long", random_prompt(40, 9)))
    prefill, resources = harness.core.prefill, harness.core.resources
    while prefill.current is None:
        harness.step()
    assert 0 < prefill.current.prefilled_len < 40
    reserve, short = resources.reserve_step, [True, True]  # once in flight, once with nothing left to wait for
    monkeypatch.setattr(resources, "reserve_step", lambda req: not (short and short.pop()) and reserve(req))
    if overlap:
        harness.step()
    else:
        short.pop()
    harness.send(AbortReq(rid="long"))
    outcomes = harness.run()
    assert outcomes["long"].reason.type == "abort"
    assert (harness.core.decode.num_retracted, outcomes["r2"].retractions) == (1, 1)
    assert [len(outcomes[f"r{i}"].ids) for i in range(3)] == [40] * 3


def test_the_oldest_request_is_never_retracted_for_a_younger_one(model_dir):
    harness = Harness(model_dir, max_total_tokens=150)
    outcomes = harness.run(*(request(f"r{i}", random_prompt(30, i), max_new_tokens=60) for i in range(4)))
    assert outcomes["r0"].retractions == 0
    assert sum(outcome.retractions for outcome in outcomes.values()) > 0
    assert all(len(outcome.ids) == 60 for outcome in outcomes.values())


def test_a_request_that_fills_the_whole_pool_ends_by_length(model_dir):
    harness = Harness(model_dir, max_total_tokens=100)
    outcome = harness.run(request("big", random_prompt(20, 1), max_new_tokens=1000))["big"]
    assert outcome.reason.type == "length"
    assert 20 + len(outcome.ids) <= 100


def test_a_prompt_larger_than_the_pool_is_refused_and_others_are_served(model_dir):
    harness = Harness(model_dir, max_total_tokens=100)
    outcomes = harness.run(request("big", random_prompt(200, 1)), request("ok", random_prompt(10, 1)))
    assert (outcomes["big"].reason.type, outcomes["big"].reason.status_code) == ("abort", 400)
    assert outcomes["ok"].reason.type == "length"


def test_double_free_and_exhaustion_are_errors():
    slots = SlotAllocator(2)
    first = slots.alloc()
    slots.free(first)
    with pytest.raises(ValueError, match="not in use"):
        slots.free(first)
    pages = TokenToKVPoolAllocator(32, 16)
    taken = pages.alloc_pages(2)
    with pytest.raises(OutOfSlotsError):
        pages.alloc_pages(1)
    pages.free_slots(taken)
    assert pages.available == pages.total == 32
