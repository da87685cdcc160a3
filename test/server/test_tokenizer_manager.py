"""Tokenizer manager over a scripted scheduler: answers, batches, aborts, duplicate ids."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from server.fake_scheduler import EOS, MAX_RUNNING, MUTE, REFUSE, SLOW
from server.serving_helpers import IDS, collect, request, running_manager, serve, small_tokenizer, until
from sgling.srt.managers.generate_req import GenerateReqInput, RequestError
from sgling.srt.managers.request_observer import MetricsObserver, RequestLog
from sgling.srt.observability.metrics import ServerMetrics

FINAL_META = {
    "id": "a",
    "finish_reason": {"type": "length", "length": 8},
    "prompt_tokens": 4,
    "completion_tokens": 8,
    "reasoning_tokens": 0,
    "cached_tokens": 0,
    "cached_tokens_details": {"device": 0, "host": 0},
    "weight_version": "default",
    "num_retractions": 0,
    "dp_rank": None,
    "spec_verify_ct": 3,
    "spec_accept_length": 8 / 3,
    "spec_num_correct_drafts": 1,
    "spec_num_proposed_drafts": 9,
    "spec_accept_rate": 1 / 9,
    "spec_correct_drafts_histogram": [0, 1],
    "spec_accepted_runs": [3, 3, 2],
    "spec_width_histogram": [],
    "spec_depth_reason": "",
}


def test_stream_is_cumulative_with_one_answer_per_increment():
    async def test(manager, scheduler):
        answers = await collect(manager, request(max_new_tokens=8, stream=True, rid="a"))
        assert [answer["output_ids"] for answer in answers] == [(IDS * 2)[:n] for n in (3, 6, 8)]
        assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [3, 6, 8]
        assert [answer["meta_info"]["finish_reason"] for answer in answers[:2]] == [None, None]
        for answer in answers:
            assert answer["text"] == small_tokenizer().decode(answer["output_ids"])
            assert "index" not in answer

    serve(test)


def test_final_meta_info():
    async def test(manager, scheduler):
        first, *_, last = await collect(manager, request(max_new_tokens=8, stream=True, rid="a"))
        assert not any(name.startswith(("spec_", "e2e", "response_sent")) for name in first["meta_info"])
        meta = last["meta_info"]
        assert meta.pop("e2e_latency") > 0
        assert abs(meta.pop("response_sent_to_client_ts") - time.time()) < 5
        assert meta.keys() == FINAL_META.keys()
        assert meta | FINAL_META == meta

    serve(test)


def test_spec_fields_only_with_speculation():
    async def test(manager, scheduler):
        (answer,) = await collect(manager, request(max_new_tokens=3))
        assert not any(name.startswith("spec_") for name in answer["meta_info"])

    serve(test, speculative_algorithm="none")


def test_non_stream_yields_only_the_end():
    async def test(manager, scheduler):
        (answer,) = await collect(manager, request(input_ids=[40, 41, EOS, 42], max_new_tokens=50))
        assert answer["output_ids"] == [40, 41, EOS]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
        assert answer["text"] == small_tokenizer().decode([40, 41])
        (answer,) = await collect(manager, request(max_new_tokens=0))
        assert answer["output_ids"] == [] and answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(stream):
    async def test(manager, scheduler):
        body = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [7, 9], "logprob_start_len": 0}
        answers = await collect(manager, request(max_new_tokens=8, stream=stream, return_text_in_logprobs=True, **body))
        for answer in answers:
            meta, ids = answer["meta_info"], answer["output_ids"]
            text = [small_tokenizer().decode([i]) for i in ids]
            assert meta["output_token_logprobs"] == [[-0.5 * i, i, t] for i, t in zip(ids, text, strict=True)]
            assert meta["output_token_logprobs_length"] == len(ids)
            assert [len(row) for row in meta["output_top_logprobs"]] == [2] * len(ids)
            assert [[entry[1] for entry in row] for row in meta["output_token_ids_logprobs"]] == [[7, 9]] * len(ids)
            assert [entry[1] for entry in meta["input_token_logprobs"]] == IDS
            assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
        (plain,) = await collect(manager, request(max_new_tokens=2, return_logprob=True))
        assert plain["meta_info"]["output_token_logprobs"] == [[-20.0, 40, None], [-20.5, 41, None]]
        assert "output_top_logprobs" not in plain["meta_info"]
        assert plain["meta_info"]["input_token_logprobs"] == []

    serve(test)


def test_batch_and_choices_are_prompt_major():
    async def test(manager, scheduler):
        body = {"input_ids": [[40, 41], [50, 51]], "rid": ["p", "q"], "n": 2, "max_new_tokens": 4}
        answers = await collect(manager, request(**body))
        assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
        assert [answer["output_ids"][0] for answer in answers] == [40, 40, 50, 50]
        assert [answer["meta_info"]["id"] for answer in answers] == ["p_0", "p_1", "q_0", "q_1"]
        chunks = await collect(manager, request(stream=True, **body))
        for index in range(4):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert [len(chunk["output_ids"]) for chunk in mine] == [3, 4]
        (single,) = await collect(manager, request(input_ids=[[40, 41]], max_new_tokens=2))
        assert single["index"] == 0

    serve(test)


def test_choices_of_a_seeded_request_differ_in_seed():
    obj = request(n=3, sampling_seed=2**63 - 2)
    from sgling.srt.sampling.sampling_params import SamplingParams

    seeds = [item.sampling_params.sampling_seed for item in obj.items(SamplingParams.from_dict)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {item.sampling_params.n for item in obj.items(SamplingParams.from_dict)} == {1}


def test_reasoning_tokens_end_with_the_marker():
    async def test(manager, scheduler):
        for end, count in ((42, 3), (99, 8)):
            obj = request(max_new_tokens=8)
            obj.reasoning_end_ids = (end,)
            (answer,) = await collect(manager, obj)
            assert answer["meta_info"]["reasoning_tokens"] == count

    serve(test)


def test_abort_ends_the_request_with_its_partial_text():
    async def test(manager, scheduler):
        task = asyncio.create_task(collect(manager, request(input_ids=[SLOW, 40], max_new_tokens=200, rid="x")))
        await until(lambda: manager.num_live == 1 and scheduler.seen)
        manager.abort_request("nope")
        await asyncio.sleep(0.05)
        manager.abort_request("x")
        (answer,) = await asyncio.wait_for(task, 3)
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 200
        tasks = [asyncio.create_task(collect(manager, request(input_ids=[MUTE]))) for _ in range(3)]
        await until(lambda: manager.num_live == 3)
        manager.abort_request(abort_all=True)
        for (answer,) in await asyncio.wait_for(asyncio.gather(*tasks), 3):
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert manager.num_live == 0

    serve(test)


def test_abort_by_group_reaches_every_choice():
    async def test(manager, scheduler):
        task = asyncio.create_task(collect(manager, request(input_ids=[MUTE], n=2, rid="x")))
        await until(lambda: len(scheduler.seen) == 2)
        manager.abort_request("x")
        answers = await asyncio.wait_for(task, 3)
        assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_early_aborts_and_frees_the_id(stream):
    async def test(manager, scheduler):
        for _ in range(20):
            task = asyncio.create_task(collect(manager, request(input_ids=[SLOW], rid="x", stream=stream)))
            await until(lambda: manager.num_live == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert manager.num_live == 0
        # the id is free at once, and no token of a predecessor shows up
        (answer,) = await collect(manager, request(rid="x", max_new_tokens=4))
        assert answer["output_ids"] == IDS and answer["meta_info"]["id"] == "x"
        await until(lambda: not scheduler.live and not manager._gone)
        assert len(scheduler.aborted) == 20

    serve(test)


def test_closing_the_iterator_aborts():
    async def test(manager, scheduler):
        async with aclosing(manager.generate_request(request(input_ids=[SLOW], stream=True))) as answers:
            await anext(answers)
        assert manager.num_live == 0
        await until(lambda: len(scheduler.aborted) == 1)

    serve(test)


def test_duplicate_ids_are_refused_while_alive():
    async def test(manager, scheduler):
        task = asyncio.create_task(collect(manager, request(input_ids=[SLOW, 41], rid="x", max_new_tokens=30)))
        await until(lambda: manager.num_live == 1)
        with pytest.raises(RequestError, match="'x' is still running") as error:
            await collect(manager, request(rid="x"))
        assert error.value.status_code == 400
        with pytest.raises(RequestError, match="still running"):
            await collect(manager, request(input_ids=[[40], [41]], rid=["y", "x"]))
        assert manager.num_live == 1
        (answer,) = await task
        assert len(answer["output_ids"]) == 30  # untouched
        assert len(await collect(manager, request(rid="x"))) == 1
        with pytest.raises(RequestError, match="Duplicate request ids"):
            await collect(manager, request(input_ids=[[40], [41]], rid=["y", "y"]))
        with pytest.raises(RequestError, match="HEALTH_CHECK"):
            await collect(manager, request(rid="HEALTH_CHECK_1"))

    serve(test)


def test_the_id_of_a_group_is_taken_too():
    """An abort by it would have ended another client's request."""

    async def test(manager, scheduler):
        group = request(input_ids=[[SLOW, 40], [SLOW, 41]], rid="g", max_new_tokens=30)
        task = asyncio.create_task(collect(manager, group))
        await until(lambda: manager.num_live == 2)
        for body in ({"rid": "g"}, {"rid": "g_1"}, {"rid": "g", "input_ids": [40], "n": 2}):
            with pytest.raises(RequestError, match="still running"):
                await collect(manager, request(**body))
        assert len(await task) == 2
        assert len(await collect(manager, request(rid="g"))) == 1

    serve(test)


def test_full_queue_is_503():
    async def test(manager, scheduler):
        tasks = [asyncio.create_task(collect(manager, request(input_ids=[MUTE]))) for _ in range(MAX_RUNNING + 1)]
        await until(lambda: manager.num_live == MAX_RUNNING + 1)
        with pytest.raises(RequestError, match="queue is full") as error:
            await collect(manager, request())
        assert error.value.status_code == 503
        manager.abort_request(abort_all=True)
        await asyncio.gather(*tasks)
        assert len(await collect(manager, request())) == 1

    serve(test, max_queued_requests=1)


def test_engine_failure_of_one_request():
    async def test(manager, scheduler):
        for stream in (False, True):
            with pytest.raises(RequestError, match="out of memory") as error:
                await collect(manager, request(input_ids=[REFUSE], stream=stream))
            assert error.value.status_code == 500
        with pytest.raises(RequestError, match="out of memory"):
            await collect(manager, request(input_ids=[[MUTE], [REFUSE]]))
        await until(lambda: not scheduler.live)  # the neighbour in the batch was aborted

    serve(test)


def test_state_flush_and_server_info():
    async def test(manager, scheduler):
        assert (await manager.internal_state())["avg_spec_accept_length"] == 2.5
        assert await manager.flush_cache() == (True, "")
        task = asyncio.create_task(collect(manager, request(input_ids=[MUTE])))
        await until(lambda: scheduler.live)
        assert (await manager.flush_cache())[0] is False
        task.cancel()
        info = await manager.server_info()
        assert info["internal_states"][0]["avg_spec_accept_length"] == 2.5
        assert info["max_running_requests"] == MAX_RUNNING and info["speculative_algorithm"] == "NEXTN"

    serve(test)


def test_observers_see_every_request():
    metrics = ServerMetrics({"model_name": "m"})

    async def test(manager, scheduler):
        await collect(manager, request(max_new_tokens=8))
        await manager.health_check(2.0)  # is not counted
        task = asyncio.create_task(collect(manager, request(input_ids=[MUTE, 40])))
        await until(lambda: manager.num_live == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        text = metrics.render()[0].decode()
        assert 'sglang:num_requests_total{model_name="m"} 2.0' in text
        assert 'sglang:num_aborted_requests_total{model_name="m"} 1.0' in text
        assert 'sglang:generation_tokens_total{model_name="m"} 8.0' in text
        assert 'sglang:prompt_tokens_total{model_name="m"} 6.0' in text
        assert 'sglang:inter_token_latency_seconds_count{model_name="m"} 5.0' in text

    serve(test, observers=[MetricsObserver(metrics), RequestLog(3)])


def test_without_a_tokenizer_ids_are_served():
    async def body():
        async with running_manager(None) as (manager, _):
            (answer,) = await collect(manager, request(max_new_tokens=3))
            assert answer["output_ids"] == IDS[:3] and answer["text"] == ""
            with pytest.raises(RequestError, match="needs a tokenizer"):
                await collect(manager, GenerateReqInput.from_json({"text": "x"}))

    asyncio.run(body())
