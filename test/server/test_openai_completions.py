"""``/v1/completions`` through the unmodified ``openai`` client and through plain HTTP."""

import json

import httpx
import openai
import pytest

from server.openai_helpers import chat_tokenizer, scripted_server, stream_events


@pytest.fixture(scope="module")
def running():
    found = scripted_server().start()
    yield found
    found.stop()


@pytest.fixture
def server(running):
    running.scheduler.reset()
    return running


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def events(server, body):
    return stream_events(server, "/v1/completions", body)


def test_text_prompt(server, client):
    server.scheduler.answers = [" the lazy dog"]
    answer = client.completions.create(model="any", prompt="The quick", max_tokens=50, seed=5, temperature=0.5)
    assert (answer.object, answer.model) == ("text_completion", "any")
    assert answer.model_extra["metadata"] == {"weight_version": "default"}
    choice = answer.choices[0]
    end = chat_tokenizer().token_to_id("<|role_end|>")
    assert (choice.index, choice.text, choice.finish_reason, choice.matched_stop) == (0, " the lazy dog", "stop", end)
    count = len(chat_tokenizer().encode(" the lazy dog").ids) + 1
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (count, count + answer.usage.prompt_tokens)
    assert answer.usage.prompt_tokens_details is None and answer.usage.reasoning_tokens == 0
    params = server.scheduler.received[0].sampling_params
    assert (params.sampling_seed, params.temperature, params.top_p, params.max_new_tokens) == (5, 0.5, 1.0, 50)


def test_defaults_and_nulls(server):
    body = {"prompt": "x", "stop": None, "max_tokens": None, "temperature": None, "n": None, "logprobs": None}
    body |= {"stream": None, "stream_options": None, "echo": None, "seed": None, "foo": 1, "best_of": 1, "user": None}
    server.scheduler.answers = ["a" * 100]
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 16 and answer["choices"][0]["finish_reason"] == "length"
    params = server.scheduler.received[0].sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (1.0, 1.0, -1, 16)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_forms_n_and_order(server, client, stream):
    tokenizer = chat_tokenizer()
    one, two = tokenizer.encode("one").ids, tokenizer.encode("two").ids
    for prompt in (["one", "two"], [one, two]):
        server.scheduler.answers = [" a", " b", " c", " d"]
        answer = client.completions.create(model="m", prompt=prompt, n=2, echo=True, stream=stream)
        texts = {0: "", 1: "", 2: "", 3: ""}
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {0: "one a", 1: "one b", 2: "two c", 3: "two d"}
    server.scheduler.answers = [" a"]
    assert client.completions.create(model="m", prompt=one, echo=True).choices[0].text == "one a"


def test_usage_counts_each_prompt_once(server, client):
    answer = client.completions.create(model="m", prompt=["one", "two two"], n=3)
    lengths = [len(chat_tokenizer().encode(text).ids) for text in ("one", "two two")]
    assert answer.usage.prompt_tokens == sum(lengths)
    assert answer.usage.completion_tokens == 6 * (len(chat_tokenizer().encode("ok").ids) + 1)


@pytest.mark.parametrize("run_len", [1, 2, 7])
def test_stop_string(server, client, run_len):
    server.scheduler.run_len = run_len
    server.scheduler.answers = ["1, 2, 3, 4, 5"]
    for stream in (False, True):
        answer = client.completions.create(model="m", prompt="x", max_tokens=99, stop=["zzz", ", 3"], stream=stream)
        chunks = [chunk.choices[0] for chunk in (answer if stream else [answer])]
        assert "".join(chunk.text for chunk in chunks) == "1, 2"
        assert [(c.finish_reason, c.matched_stop) for c in chunks if c.finish_reason] == [("stop", ", 3")]


def test_stream_framing(server):
    server.scheduler.answers = ["안녕하세요 세계! 👩‍👩‍👧‍👦"]
    server.scheduler.run_len = 1
    found = events(server, {"prompt": "x", "max_tokens": 500})
    assert "".join(chunk["choices"][0]["text"] for chunk in found) == server.scheduler.answers[0]
    assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in found)
    assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in found)
    assert [chunk["choices"][0]["finish_reason"] for chunk in found].count("stop") == 1
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found}) == 1


def test_usage_chunk_only_when_asked(server):
    found = events(server, {"prompt": "x", "stream_options": {"include_usage": True, "continuous_usage_stats": None}})
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in found[:-1])
    found = events(server, {"prompt": "x", "stream_options": {"include_usage": False, "continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[0] > 0 and all(chunk["choices"] for chunk in found)


@pytest.mark.parametrize("top", [0, 2])
def test_logprobs_whole_and_streamed(server, client, top):
    server.scheduler.answers = ["The quick brown fox"]
    whole = client.completions.create(model="m", prompt="x", max_tokens=40, logprobs=top)
    logprobs = whole.choices[0].logprobs
    count = whole.usage.completion_tokens
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == count
    assert set(logprobs.text_offset) == {-1}
    assert "".join(logprobs.tokens[:-1]) == "The quick brown fox"
    if top:
        assert [len(entry) for entry in logprobs.top_logprobs] == [2] * count
    pieces = client.completions.create(model="m", prompt="x", max_tokens=40, logprobs=top, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in pieces if chunk.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == logprobs.tokens
    assert [value for part in parts for value in part.token_logprobs] == logprobs.token_logprobs
    if top:
        assert [entry for part in parts for entry in part.top_logprobs] == logprobs.top_logprobs


def test_echo_with_logprobs_scores_the_prompt(server, client):
    prompt = chat_tokenizer().encode("The quick").ids
    answer = client.completions.create(model="m", prompt=[prompt, prompt], max_tokens=1, logprobs=1, echo=True)
    for choice in answer.choices:
        assert choice.text == "The quicko" and choice.finish_reason == "length"
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(prompt) + 1
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert all(value is not None for value in logprobs.token_logprobs[1:])
        assert "".join(logprobs.tokens) == "The quicko"


def test_extensions(server, client):
    extra = {"return_token_ids": True, "return_meta_info": True, "return_spec_tokens_details": True}
    extra |= {"return_cached_tokens_details": True, "rid": "mine", "logit_bias": {"7": -100, "8": 1.5}, "top_k": 5}
    answer = client.completions.create(model="m", prompt="x", extra_body=extra)
    choice = answer.choices[0]
    assert answer.id == "mine" and choice.meta_info["id"] == "mine"
    assert choice.prompt_token_ids == chat_tokenizer().encode("x").ids
    assert chat_tokenizer().decode(choice.token_ids) == "ok"
    assert answer.sglext["spec_tokens_details"]["verify_ct"] >= 1
    assert answer.sglext["cached_tokens_details"] == {"device": 0, "host": 0}
    params = server.scheduler.received[0].sampling_params
    assert params.logit_bias == {7: -100.0, 8: 1.5} and params.top_k == 5
    found = events(server, {"prompt": "x", **extra, "stream_options": {"include_usage": True}})
    assert [i for chunk in found for c in chunk["choices"] for i in c["token_ids"]] == choice.token_ids
    assert found[-2]["choices"] == [] and "spec_tokens_details" in found[-2]["sglext"]
    assert found[-1]["choices"] == [] and found[-1]["usage"] is not None


def test_reusing_a_finished_rid(client):
    for _ in range(2):
        assert client.completions.create(model="m", prompt="x", extra_body={"rid": "again"}).id == "again"


BAD = {
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens -1": ({"max_tokens": -1}, "max_tokens"),
    "n 0": ({"n": 0}, "n"),
    "temperature": ({"temperature": -1}, "temperature"),
    "temperature text": ({"temperature": "hot"}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "penalty": ({"frequency_penalty": 100}, "frequency_penalty"),
    "stops": ({"stop": ["a"] * 33 + [str(i) for i in range(33)]}, "stop"),
    "empty stop": ({"stop": ""}, "stop"),
    "null stop": ({"stop": [None]}, "stop"),
    "bias id": ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    "bias key": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "logprobs": ({"logprobs": 100000}, "top_logprobs"),
    "logprobs -1": ({"logprobs": -1}, "logprobs"),
    "logprobs true": ({"logprobs": True}, "logprobs"),
    "stop id": ({"stop_token_ids": [-5]}, "stop_token_ids"),
    "suffix": ({"suffix": "end"}, "suffix"),
    "lora": ({"lora_path": "a"}, "lora_path"),
    "adapter": ({"model": "m:adapter"}, "adapter"),
    "regex": ({"regex": "a+"}, "not built"),
    "json": ({"response_format": {"type": "json_object"}}, "not built"),
    "json_schema": ({"response_format": {"type": "json_schema"}}, "schema"),
    "empty prompt": ({"prompt": ""}, "empty"),
    "no prompts": ({"prompt": []}, "empty"),
    "bad id": ({"prompt": [-1]}, "-1"),
    "mixed ids": ({"prompt": [1, "a"]}, "prompt"),
    "nested bad id": ({"prompt": [[1], [99999]]}, "99999"),
    "bool id": ({"prompt": [True]}, "prompt"),
    "too long": ({"prompt": [5] * 3000}, "context length"),
    "too many": ({"max_tokens": 5000}, "maximum context length"),
    "stream": ({"stream": "maybe"}, "stream"),
    "surrogate": ({"prompt": "\ud800"}, "nicode"),
}


@pytest.mark.parametrize("change, names", BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_400_before_any_event(server, change, names, stream):
    body = json.dumps({"prompt": "x", "stream": stream, **change})
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.base_url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert set(error) == {"object", "message", "type", "param", "code"}
    assert error["object"] == "error" and error["code"] == 400 and names in error["message"]
    assert not server.scheduler.received


@pytest.mark.parametrize(
    "body", [b'{"a":', b"[]", b"null", b'"x"', b"{}", b"", b"\xff", b"[" * 100000, b'{"prompt": NaN}']
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_broken_bodies_are_400(server, path, body):
    answer = httpx.post(server.base_url + path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["type"] == "Bad Request"
    answer = httpx.post(server.base_url + path, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400


def test_client_errors_and_engine_failures(server, client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="m", prompt="x", temperature=-1)
    server.scheduler.fail_after = 0
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            client.completions.create(model="m", prompt="x", stream=stream)
    server.scheduler.fail_after = 2
    server.scheduler.answers = ["The quick brown fox jumps"]
    with pytest.raises(openai.APIError, match="out of memory"):
        list(client.completions.create(model="m", prompt="x", stream=True, max_tokens=99))
    found = events(server, {"prompt": "x", "max_tokens": 99})
    assert found[-1]["error"]["code"] == 500 and found[-1]["error"]["message"] == "out of memory"
    server.scheduler.fail_after = None
    assert client.completions.create(model="m", prompt="x", max_tokens=1).choices[0].text
