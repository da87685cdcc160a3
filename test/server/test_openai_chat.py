"""``/v1/chat/completions`` through the unmodified ``openai`` client: answers, streams, reasoning, prompts."""

import json

import httpx
import openai
import pytest

from server.openai_helpers import chat_tokenizer, prompt_of, scripted_server, stream_events, wait_for

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "2+2?"}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def running():
    found = scripted_server(enable_cache_report=True).start()
    yield found
    found.stop()


@pytest.fixture
def server(running):
    running.scheduler.reset()
    return running


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def ask(client, messages=USER, **options):
    return client.chat.completions.create(model="m", messages=messages, **options)


def joined(chunks):
    """(reasoning, content, finish reasons) of a stream of chunk bodies."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert all("reasoning_content" in delta for delta in deltas)
    reasoning = "".join(delta["reasoning_content"] or "" for delta in deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)
    return reasoning, content, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def test_plain_answer(server, client):
    server.scheduler.answers = ["Four."]
    answer = ask(client, seed=3, max_tokens=50)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.finish_reason) == ("chat.completion", "m", "stop")
    assert (choice.message.role, choice.message.content, choice.message.reasoning_content) == (
        "assistant",
        "Four.",
        None,
    )
    assert "tool_calls" not in choice.message.model_fields_set and choice.logprobs is None
    assert choice.matched_stop == chat_tokenizer().token_to_id("<|role_end|>")
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    expected = "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>2+2?<|role_end|>"
    assert prompt_of(server) == expected + "<role>ASSISTANT</role>\n<think></think>"
    assert server.scheduler.received[0].sampling_params.sampling_seed == 3


def test_budget(server, client):
    for options, limit in [({}, None), ({"max_tokens": 7}, 7), ({"max_tokens": 7, "max_completion_tokens": 3}, 3)]:
        ask(client, **options)
        assert server.scheduler.received[-1].sampling_params.max_new_tokens == limit
    answer = ask(client, max_tokens=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage.completion_tokens == 0
    server.scheduler.answers = ["again and again " * 300]
    answer = ask(client)
    assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == 2048


@pytest.mark.parametrize("run_len", [1, 2, 5, 50])
def test_stream_order(server, run_len):
    server.scheduler.run_len = run_len
    server.scheduler.answers = ["Two and two.\n</think>\n\nFour 서울 👩‍👩‍👧‍👦."]
    body = {"messages": USER, "stream_options": {"include_usage": True, "continuous_usage_stats": False}, **THINK}
    chunks = stream_events(server, PATH, body)
    assert joined(chunks) == ("Two and two.", "Four 서울 👩‍👩‍👧‍👦.", ["stop"])
    first = chunks[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": "", "reasoning_content": None}
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks[:-1]) == 1
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
    usage = chunks[-1]["usage"]
    close = chat_tokenizer().token_to_id("</think>")
    ids = chat_tokenizer().encode(server.scheduler.answers[0]).ids
    assert usage["reasoning_tokens"] == ids.index(close) + 1 <= usage["completion_tokens"] == len(ids) + 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    body["stream_options"] = {"continuous_usage_stats": True}
    assert all(chunk["usage"]["completion_tokens"] > 0 for chunk in stream_events(server, PATH, body))


def test_thinking_whole(server, client):
    server.scheduler.answers = ["Two and two.\n</think>\n\nFour."]
    message = ask(client, extra_body=THINK).choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
    assert prompt_of(server).endswith("<role>ASSISTANT</role>\n<think>")
    message = ask(client, extra_body={**THINK, "separate_reasoning": False}).choices[0].message
    assert (message.reasoning_content, message.content) == (None, server.scheduler.answers[0])


def test_stray_close_tag_passes_without_thinking(server, client):
    server.scheduler.answers = ["a</think>b"]
    assert ask(client).choices[0].message.content == "a</think>b"
    assert joined(stream_events(server, PATH, {"messages": USER}))[:2] == ("", "a</think>b")


@pytest.mark.parametrize("limit, reason", [(None, "stop"), (4, "length")])
def test_unclosed_thinking(server, client, limit, reason):
    server.scheduler.answers = ["Hm, two and two"]
    text = chat_tokenizer().decode(chat_tokenizer().encode(server.scheduler.answers[0]).ids[:limit])
    choice = ask(client, max_tokens=limit, extra_body=THINK).choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == (None, text)
    assert choice.finish_reason == reason
    chunks = stream_events(server, PATH, {"messages": USER, "max_tokens": limit, **THINK})
    assert joined(chunks) == (text, text, [reason])
    assert chunks[-2]["choices"][0]["delta"]["content"] == text


def test_reasoning_in_one_piece(server):
    server.scheduler.answers = ["Two and two.</think>Four."]
    chunks = stream_events(server, PATH, {"messages": USER, "stream_reasoning": False, **THINK})
    assert joined(chunks) == ("Two and two.", "Four.", ["stop"])
    assert sum(bool(chunk["choices"][0]["delta"]["reasoning_content"]) for chunk in chunks) == 1


@pytest.mark.parametrize(
    "extra, thinks",
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning_effort": "none", **THINK}, True),
        ({"chat_template_kwargs": None}, False),
    ],
)
def test_thinking_switches(server, extra, thinks):
    assert httpx.post(server.base_url + PATH, json={"messages": USER, **extra}).status_code == 200
    assert prompt_of(server).endswith("<think>") is thinks


def test_prompt_of_a_long_conversation(server, client):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1, "s": "é"}'}}
    messages = [
        {"role": "Developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "think"},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "function", "name": "add", "content": "3"},
        {"role": "assistant", "content": "five", "name": "x"},
        {"role": "user", "content": "ok"},
    ]
    ask(client, messages)
    assert prompt_of(server) == (
        "<role>SYSTEM</role>Be brief.\ndetailed thinking off<|role_end|><role>HUMAN</role>q<|role_end|>"
        "<role>ASSISTANT</role>\n<think>think</think><tool_call>add<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>s</arg_key>\n<arg_value>é</arg_value>\n</tool_call><|role_end|>"
        "<role>OBSERVATION</role>\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>five<|role_end|><role>HUMAN</role>ok<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>"
    )


def test_continuing_a_message(server, client):
    server.scheduler.answers = [" is four."]
    messages = [*USER, {"role": "assistant", "content": "The sum "}]
    answer = ask(client, messages, extra_body={"continue_final_message": True})
    assert prompt_of(server).endswith("<role>ASSISTANT</role>\n<think></think>The sum ")
    assert answer.choices[0].message.content == " is four."
    server.scheduler.answers = [" then</think>Four"]
    messages[-1] = {"role": "assistant", "content": None, "reasoning_content": "First"}
    answer = ask(client, messages, extra_body={"continue_final_message": True})
    assert prompt_of(server).endswith("<think>First")
    assert (answer.choices[0].message.reasoning_content, answer.choices[0].message.content) == (" then", "Four")


def test_tokenised_prompt(server, client):
    ids = chat_tokenizer().encode("x<role>ASSISTANT</role>\n<think>").ids
    server.scheduler.answers = ["a</think>b"]
    answer = httpx.post(server.base_url + PATH, json={"input_ids": ids}).json()
    assert server.scheduler.received[0].input_ids == ids
    assert answer["choices"][0]["message"]["reasoning_content"] == "a"


def test_several_choices_are_parsed_apart(server, client):
    texts = ["a</think>b", "c</think>d", "e"]
    server.scheduler.answers = [*texts]
    answer = ask(client, n=3, extra_body=THINK)
    found = [(c.message.reasoning_content, c.message.content) for c in answer.choices]
    assert found == [("a", "b"), ("c", "d"), (None, "e")]
    server.scheduler.answers, server.scheduler.run_len = [*texts], 1
    chunks = stream_events(server, PATH, {"messages": USER, "n": 3, **THINK})
    parts = [[chunk for chunk in chunks if chunk["choices"][0]["index"] == i] for i in range(3)]
    assert [joined(part) for part in parts] == [("a", "b", ["stop"]), ("c", "d", ["stop"]), ("e", "e", ["stop"])]


@pytest.mark.parametrize("top", [None, 0, 2])
def test_logprobs(server, client, top):
    server.scheduler.answers = ["서울</think>b"]
    entries = ask(client, logprobs=True, top_logprobs=top, extra_body=THINK).choices[0].logprobs.content
    ids = [*chat_tokenizer().encode(server.scheduler.answers[0]).ids, chat_tokenizer().token_to_id("<|role_end|>")]
    assert len(entries) == len(ids) and [entry.logprob for entry in entries] == [-0.5 * i for i in ids]
    assert bytes(b for entry in entries[:-1] for b in entry.bytes).decode() == server.scheduler.answers[0]
    assert {len(entry.top_logprobs) for entry in entries} == {top or 0}
    body = {"messages": USER, "logprobs": True, "top_logprobs": top, **THINK}
    chunks = stream_events(server, PATH, body)
    pieces = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert pieces == [entry.model_dump() for entry in entries]


def test_extensions(server, client):
    extra = {"return_token_ids": True, "return_meta_info": True, "return_spec_tokens_details": True, "rid": "r1"}
    answer = ask(client, extra_body=extra)
    choice = answer.choices[0]
    assert answer.id == "r1" and choice.meta_info["spec_verify_ct"] >= 1
    assert chat_tokenizer().decode(choice.token_ids) == "ok" and choice.prompt_token_ids
    assert answer.sglext["spec_tokens_details"]["accept_length"] >= 1
    chunks = stream_events(server, PATH, {"messages": USER, **extra, "stream_options": {"include_usage": True}})
    ids = [i for chunk in chunks if chunk["choices"] for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == choice.token_ids
    assert chunks[-2]["choices"] == [] and "sglext" in chunks[-2] and chunks[-1]["usage"]


BAD = {
    "no messages": ({"messages": []}, "messages"),
    "missing": ({"messages": None}, "messages"),
    "text": ({"messages": "hi"}, "messages"),
    "role": ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "image_url",
    ),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "JSON",
    ),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 100000}, "top_logprobs"),
    "top_logprobs alone": ({"top_logprobs": 3}, "logprobs"),
    "logprobs": ({"logprobs": 3}, "logprobs"),
    "max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens type": ({"max_tokens": True}, "max_tokens"),
    "n": ({"n": 0}, "n"),
    "template": ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
    "template self": ({"chat_template_kwargs": {"self": 1}}, "self"),
    "template messages": ({"chat_template_kwargs": {"messages": []}}, "messages"),
    "schema": ({"response_format": {"type": "json_schema"}}, "schema"),
    "structured": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": {}}}},
        "not built",
    ),
    "format": ({"response_format": {"type": "yaml"}}, "response_format"),
    "ebnf": ({"ebnf": "root ::= 'a'"}, "not built"),
    "effort": ({"reasoning_effort": "huge"}, "reasoning_effort"),
    "continue": ({"continue_final_message": True}, "continue_final_message"),
    "too long": ({"messages": [{"role": "user", "content": "xyz " * 3000}]}, "context length"),
    "too many": ({"max_tokens": 2048}, "maximum context length"),
    "min_p": ({"min_p": -0.1}, "min_p"),
    "seed": ({"seed": 2**70}, "seed"),
    "stop": ({"stop": [""]}, "stop"),
    "ids": ({"input_ids": [999999]}, "999999"),
    "adapter": ({"model": "a:b"}, "adapter"),
}


@pytest.mark.parametrize("change, names", BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_400_before_any_event(server, change, names, stream):
    answer = httpx.post(server.base_url + PATH, json={"messages": USER, "stream": stream, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["object"] == "error" and error["code"] == 400 and names in error["message"]
    assert not server.scheduler.received


def test_unknown_fields_and_text_format_are_fine(server):
    body = {"messages": USER, "foo": 1, "response_format": {"type": "text"}, "tools": None, "tool_choice": None}
    assert httpx.post(server.base_url + PATH, json=body).status_code == 200


def test_failures(server, client):
    with pytest.raises(openai.BadRequestError, match="top_p"):
        ask(client, top_p=2)
    server.scheduler.fail_after = 0
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError):
            ask(client, stream=stream)
    server.scheduler.fail_after = 1
    server.scheduler.answers = ["a longer answer than one step"]
    with pytest.raises(openai.APIError, match="out of memory"):
        list(ask(client, stream=True))


def test_abort_ends_the_stream_normally(server):
    server.scheduler.answers = ["word " * 300]
    server.scheduler.step_s = 0.01
    with httpx.stream(
        "POST", server.base_url + PATH, json={"messages": USER, "stream": True, "rid": "x", **THINK}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert httpx.post(f"{server.base_url}/abort_request", json={"rid": "x"}).status_code == 200
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert joined(chunks)[1:] == ("", ["abort"])  # an abort does not repeat unclosed thinking


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted(server, stream):
    server.scheduler.answers = ["word " * 300]
    server.scheduler.step_s = 0.01
    body = {"messages": USER, "stream": stream, "rid": f"leaver {stream}"}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.3) as client:
        if not stream:
            client.post(server.base_url + PATH, json=body)
        else:
            with client.stream("POST", server.base_url + PATH, json=body) as answer:
                next(answer.iter_lines())
                raise httpx.ReadTimeout("left")
    wait_for(lambda: server.scheduler.aborted == [f"leaver {stream}"])
    assert not server.manager.num_live
