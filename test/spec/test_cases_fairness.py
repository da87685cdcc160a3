"""Who waits for whom: streams and prompts share the device, and old requests are not paid for by young ones."""

from __future__ import annotations

import pytest

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.managers.request import ReqStage
from spec.harness import Harness, random_prompt, request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


def record_launches(harness: Harness) -> list[list[str]]:
    """Rids of every decode step, and ``["prefill"]`` for every chunk, as they are launched."""
    seen: list[list[str]] = []
    launch_next = harness.scheduler.launch_next

    def launch(in_flight: bool):
        launched = launch_next(in_flight)
        if launched is not None:
            seen.append(["prefill"] if launched.chunk is not None else [req.rid for req in launched.reqs])
        return launched

    harness.scheduler.launch_next = launch
    return seen


def chunks_between_steps(seen: list[list[str]], rid: str) -> int:
    """Most prefill chunks between two decode steps of a request."""
    most = count = 0
    for entry in seen[next(i for i, entry in enumerate(seen) if rid in entry) :]:
        count = 0 if rid in entry else count + (entry == ["prefill"])
        most = max(most, count)
        if entry == ["prefill"] and count > 500:
            break
    return most


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stream_waits_for_one_chunk_at_most(model_dir, overlap):
    """Case F03: prompts in an endless row never hold a running stream longer than one prefill chunk."""
    harness = Harness(model_dir, chunked_prefill_size=16, disable_overlap_schedule=not overlap)
    seen = record_launches(harness)
    harness.send(request("stream", random_prompt(10, 0), max_new_tokens=60))
    harness.step()
    harness.send(*(request(f"p{i}", random_prompt(120, i), max_new_tokens=1) for i in range(12)))
    harness.run()
    last = max(i for i, entry in enumerate(seen) if "stream" in entry)
    assert chunks_between_steps(seen[: last + 1], "stream") == 1
    assert seen[:last].count(["prefill"]) > 20  # and prompts made progress meanwhile


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [True, False])
def test_when_memory_is_short_a_prompt_being_read_yields_to_running_streams(model_dir, overlap, page_size):
    """Cases F02, F03: the stream was swapped out (or just not launched) until a younger prompt had been read."""
    options = {"page_size": page_size, "chunked_prefill_size": 7, "disable_overlap_schedule": not overlap}
    options["enable_deterministic_inference"] = True
    alone = Harness(model_dir, **options)
    prompts = {"stream": random_prompt(40, 0), "young": random_prompt(200, 1)}
    limits = {"stream": 80, "young": 40}  # both fit the pool, one after the other
    requests = {rid: request(rid, prompt, max_new_tokens=limits[rid]) for rid, prompt in prompts.items()}
    want = {rid: alone.run(req)[rid].ids for rid, req in requests.items()}
    harness = Harness(model_dir, max_total_tokens=272, **options)
    seen = record_launches(harness)
    harness.send(requests["stream"])
    harness.step()
    outcomes = harness.run(requests["young"])
    assert outcomes["stream"].retractions == 0
    assert outcomes["young"].retractions > 0
    last = max(i for i, entry in enumerate(seen) if "stream" in entry)
    assert chunks_between_steps(seen[: last + 1], "stream") <= 1
    assert {rid: outcomes[rid].ids for rid in want} == want


def test_a_prompt_swapped_out_halfway_goes_on_where_it_was(model_dir):
    """Case F02: nothing is read twice, and an abort while it is out frees everything."""
    harness = Harness(model_dir, max_total_tokens=272, chunked_prefill_size=7)
    seen = record_launches(harness)
    harness.send(request("stream", random_prompt(40, 0), max_new_tokens=80))
    harness.step()
    harness.send(request("young", random_prompt(200, 1), max_new_tokens=5))
    while not harness.core.decode.num_retracted:
        harness.step()
    (young,) = harness.core.prefill.waiting
    assert (young.rid, young.stage) == ("young", ReqStage.RETRACTED)
    assert 0 < young.prefilled_len < 200
    harness.run()
    assert seen.count(["prefill"]) == -(-40 // 7) + -(-200 // 7)
