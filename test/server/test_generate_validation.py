"""What ``/generate`` refuses, before anything is scheduled, and that the message names the value."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from tokenizers import Tokenizer, normalizers

from server.fake_scheduler import CONTEXT_LEN, MAX_INPUT_LEN
from server.serving_helpers import VOCAB_SIZE, running_manager, server_args, small_tokenizer
from sgling.srt.managers.generate_req import GenerateReqInput, RequestError
from sgling.srt.managers.request_validator import context_reserve
from sgling.srt.managers.text_codec import TextCodec

V = VOCAB_SIZE
BAD_BODIES = [
    # (body, piece of the message)
    ([], "JSON object"),
    (None, "JSON object"),
    ("x", "JSON object"),
    ({}, "text or input_ids"),
    ({"text": None}, "text or input_ids"),
    ({"text": 5}, "text must be"),
    ({"text": ["a", 5]}, "got 5"),
    ({"text": []}, "empty"),
    ({"text": ""}, "empty"),
    ({"text": ["a", ""]}, "empty"),
    ({"text": "a\ud800"}, "Unicode"),
    ({"text": "a", "stream": "maybe"}, "stream must be a boolean, got 'maybe'"),
    ({"text": "a", "stream": 1}, "stream"),
    ({"text": "a", "rid": 7}, "rid"),
    ({"text": "a", "rid": ""}, "rid"),
    ({"text": ["a", "b"], "rid": ["y", "y"]}, "Duplicate"),
    ({"text": ["a", "b"], "rid": ["y"]}, "list of 2"),
    ({"text": "a", "rid": ["y"]}, "single value"),
    ({"text": "a", "return_logprob": "yes"}, "return_logprob"),
    ({"text": "a", "sampling_params": [{}, {}]}, "single value"),
    ({"text": "a", "sampling_params": "hot"}, "sampling_params"),
    ({"text": "a", "lora_path": "x"}, "lora_path is not supported"),
    ({"text": "a", "return_hidden_states": True}, "return_hidden_states is not supported"),
    ({"text": ["a"], "input_ids": [1]}, "same batch shape"),
    # E01: ids
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[]]}, "empty"),
    ({"input_ids": [-1]}, "-1"),
    ({"input_ids": [V]}, str(V)),
    ({"input_ids": [2**40]}, str(2**40)),
    ({"input_ids": [10**400]}, "..."),
    ({"input_ids": [1, "a"]}, "'a'"),
    ({"input_ids": [1, True]}, "True"),
    ({"input_ids": [1, 2.0]}, "2.0"),
    ({"input_ids": [1, None]}, "None"),
    ({"input_ids": [[1], [V]]}, str(V)),
    ({"input_ids": [[1], 2]}, "got 2"),
    ({"input_ids": "12"}, "'12'"),
    ({"input_ids": [2], "token_ids_logprob": [V], "return_logprob": True}, str(V)),
    ({"input_ids": [2], "token_ids_logprob": [-1]}, "-1"),
    ({"input_ids": [2], "token_ids_logprob": ["x"]}, "token_ids_logprob"),
    ({"input_ids": [2], "sampling_params": {"stop_token_ids": [-5]}}, "-5"),
    ({"input_ids": [2], "sampling_params": {"logit_bias": {"99999999": 1}}}, "99999999"),
    # E02: alternatives
    ({"input_ids": [2], "return_logprob": True, "top_logprobs_num": 100000}, "100000"),
    ({"input_ids": [2], "top_logprobs_num": 100000}, "100000"),
    ({"input_ids": [2], "top_logprobs_num": -1}, "-1"),
    ({"input_ids": [2], "top_logprobs_num": True}, "True"),
    ({"input_ids": [2], "top_logprobs_num": 2.5}, "2.5"),
    ({"input_ids": [2], "return_logprob": True, "logprob_start_len": 5}, "5"),
    ({"input_ids": [2], "logprob_start_len": -2}, "-2"),
    # E06: numbers
    *[
        ({"input_ids": [2], "sampling_params": {name: value}}, name)
        for name, value in [
            ("temperature", -1),
            ("temperature", math.nan),
            ("temperature", math.inf),
            ("temperature", "hot"),
            ("top_p", 0),
            ("top_p", 1.5),
            ("top_k", 0),
            ("min_p", -0.1),
            ("repetition_penalty", 0),
            ("frequency_penalty", 100),
            ("n", 0),
            ("n", 10**9),
            ("max_new_tokens", -1),
            ("max_new_tokens", 2.5),
            ("stop", ""),
            ("stop", [None]),
            ("stop", [str(i) for i in range(33)]),
            ("foo", 1),
            ("json_schema", "{}"),
        ]
    ],
]
GOOD_BODIES = [
    {"text": "a", "lora_path": None, "return_routed_experts": False, "return_hidden_states": False, "priority": None},
    {"text": "a", "unknown_field": 1, "stream": None, "rid": None, "sampling_params": None},
    {"text": "a", "sampling_params": {"stop": [], "top_p": None, "temperature": 1e-12, "top_k": -1}},
    {"text": "a", "sampling_params": {"temperature": 1e9, "stop": None, "max_new_tokens": 0}},
    {"text": "a", "sampling_params": {"top_k": 10**9}},
    {"text": "ignored", "input_ids": [2, 3]},
    {"input_ids": [0, V - 1]},
    {"input_ids": [2], "return_logprob": True, "top_logprobs_num": V},  # the documented maximum: min(1024, vocabulary)
    {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}, {}], "top_logprobs_num": [1, 2]},
]


def test_bad_and_good_bodies():
    async def body():
        async with running_manager(small_tokenizer()) as (manager, scheduler):
            for content, piece in BAD_BODIES:
                for stream in (False, True):
                    asked = {"stream": stream, **content} if isinstance(content, dict) else content
                    with pytest.raises(RequestError) as error:
                        await manager.generate_once(GenerateReqInput.from_json(asked))
                    assert error.value.status_code == 400, content
                    assert piece in error.value.message, (content, error.value.message)
                    assert len(error.value.message) < 400
            assert scheduler.seen == [] and manager.num_live == 0
            for content in GOOD_BODIES:
                assert await manager.generate_once(GenerateReqInput.from_json(content))

    asyncio.run(body())


def lengths(prompt: int, max_new: int | None, **args):
    """Outcome of a request of these lengths: number of tokens, or the refusal."""

    async def body():
        async with running_manager(small_tokenizer(), **args) as (manager, _):
            params = {"ignore_eos": True} if max_new is None else {"ignore_eos": True, "max_new_tokens": max_new}
            obj = GenerateReqInput.from_json({"input_ids": [5] * prompt, "sampling_params": params})
            try:
                (answer,) = await manager.generate_once(obj)
            except RequestError as error:
                assert error.status_code == 400
                return error.message
            return len(answer["output_ids"])

    return asyncio.run(body())


def test_context_rules(monkeypatch):
    monkeypatch.setattr("server.fake_scheduler.MAX_INPUT_LEN", CONTEXT_LEN)
    nextn = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 5}  # reserve max(1 * 5, 6) = 6
    off = {"speculative_algorithm": "none"}
    for args, reserve in ((off, 0), (nextn, 6)):
        assert context_reserve(server_args(**args).spec) == reserve
        longest = CONTEXT_LEN - reserve - 1
        assert lengths(longest, 1, **args) == 1
        for prompt in (longest + 1, CONTEXT_LEN, CONTEXT_LEN + 1, 10 * CONTEXT_LEN):
            message = lengths(prompt, 1, **args)
            assert str(prompt) in message and str(CONTEXT_LEN) in message
        assert lengths(100, CONTEXT_LEN - 100 - reserve, **args) == CONTEXT_LEN - 100 - reserve
        message = lengths(100, CONTEXT_LEN - 100 - reserve + 1, **args)
        assert "maximum context length" in message and str(CONTEXT_LEN) in message
    # the default of 128 new tokens is clipped by the scheduler, not refused
    assert isinstance(lengths(200, None, **off), int)


def test_prompt_larger_than_the_pool_is_refused():
    assert lengths(MAX_INPUT_LEN, 1) == 1
    message = lengths(MAX_INPUT_LEN + 1, 1)
    assert str(MAX_INPUT_LEN + 1) in message and str(MAX_INPUT_LEN) in message


def test_preferred_sampling_params_fill_what_is_unset():
    async def body():
        preferred = {"max_new_tokens": 5, "temperature": 0.0}
        async with running_manager(small_tokenizer(), preferred_sampling_params=preferred) as (manager, _):
            for params, count in (({}, 5), ({"max_new_tokens": None}, 5), ({"max_new_tokens": 2}, 2)):
                obj = GenerateReqInput.from_json({"input_ids": [5], "sampling_params": params})
                (answer,) = await manager.generate_once(obj)
                assert len(answer["output_ids"]) == count

    asyncio.run(body())


def test_long_texts_do_not_stop_the_loop():
    """A megabyte of text, in one piece or in many, is tokenised beside the loop and refused with both numbers."""

    async def body(text):
        async with running_manager(small_tokenizer()) as (manager, _):
            manager.codec.most_chars_per_token = None  # or the single text is refused unread
            obj = GenerateReqInput.from_json({"text": text})
            task = asyncio.create_task(manager.generate_once(obj))
            ticks = 0
            while not task.done():
                await asyncio.sleep(0.005)
                ticks += 1
            assert ticks > 3
            with pytest.raises(RequestError, match=str(CONTEXT_LEN)):
                await task

    asyncio.run(body("hello " * 170_000))
    asyncio.run(body([f"{number} " + "hello " * 170 for number in range(1000)]))


def test_hopelessly_long_texts_are_refused_unread():
    """Case E05: 50 MB took a minute and a half to be refused, and six such clients blocked all long prompts."""

    async def body():
        async with running_manager(small_tokenizer()) as (manager, _):
            manager.codec.encode_all = None  # any use fails
            for text in ("hello " * 10_000_000, ["a", " " * 30_000_000]):
                with pytest.raises(RequestError, match=f"at least [0-9]+ tokens.*{CONTEXT_LEN}") as error:
                    await manager.generate_once(GenerateReqInput.from_json({"text": text}))
                assert error.value.status_code == 400

    begin = time.monotonic()
    asyncio.run(body())
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "text", ["\u1100\u1161\u11a8" * 20, "The quick brown fox", " " * 500, "\u03b1\u0313\u0301\u0345"]
)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC(), normalizers.Strip()])
def test_no_token_stands_for_more_text_than_the_bound_says(text, normalizer):
    tokenizer = Tokenizer.from_str(small_tokenizer().to_str())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    codec = TextCodec(tokenizer)
    bound = codec.most_chars_per_token
    if normalizer is None or isinstance(normalizer, normalizers.NFC):
        assert len(codec.encode(text)) * bound >= len(text)
    else:
        assert bound is None
