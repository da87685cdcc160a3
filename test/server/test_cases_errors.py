"""Odd requests that once broke something: each is refused by name, or runs, and the server lives on."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai import BadRequestError, OpenAI

from model.tiny_model import write_tiny_checkpoint
from server.real_server import pool, real_server, wait_idle
from server.serving_helpers import running_manager, small_tokenizer
from sgling.srt.entrypoints import request_body
from sgling.srt.managers.generate_req import GenerateReqInput

GENERATION_ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
EVERY_PROMPT = {"text": "a", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = real_server(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)).start()
    yield server
    server.stop()


@pytest.fixture
def client(server):
    with server.client() as client:
        before = pool(client)
        yield client
        wait_idle(client)
        assert pool(client) == before
        assert client.get("/health").status_code == 200


def post_raw(client, route: str, content: bytes):
    return client.post(route, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("route", GENERATION_ROUTES)
@pytest.mark.parametrize("field", ["model", "rid", "text", "user"])
def test_bytes_of_a_lone_surrogate_are_refused_like_its_escape(client, route, field):
    """Case E04: json.loads decodes bytes with surrogates let through; the answer could then not be encoded (500)."""
    raw = json.dumps({**EVERY_PROMPT, field: "MARK"}).encode()
    for bad in (b"\xed\xa0\x80", b"\\ud800", b"\xff"):
        response = post_raw(client, route, raw.replace(b"MARK", bad))
        assert response.status_code == 400
        assert response.json()["type"] == "Bad Request"


@pytest.mark.parametrize("route", GENERATION_ROUTES)
def test_bodies_are_utf8_and_nothing_else(client, route):
    """Case E04: an escape in UTF-16 went around the check for surrogates."""
    body = json.dumps({**EVERY_PROMPT, "model": "\ud800"})
    for encoding in ("utf-16", "utf-32"):
        assert post_raw(client, route, body.encode(encoding)).status_code == 400
    good = json.dumps({**EVERY_PROMPT, "model": "é"}, ensure_ascii=False)
    assert post_raw(client, "/v1/completions", b"\xef\xbb\xbf" + good.encode()).status_code == 200


@pytest.mark.parametrize("minimum", [1, 30, 10**12, 2**63 - 1])
def test_any_minimum_of_tokens_is_served(client, minimum):
    """Cases C03, E06: a minimum near int64 overflowed the position limit inside the scheduler and killed it."""
    stops = [i for i in range(512) if i % 64]  # nearly every token stops, once the minimum is reached
    prompt = [5] * 2000  # 48 positions are left
    body = {"model": "m", "input_ids": prompt, "temperature": 0, "min_tokens": minimum, "stop_token_ids": stops}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    count = response.json()["usage"]["completion_tokens"]
    assert minimum < count < 40 if minimum < 40 else count > 40  # until the context is full


@pytest.mark.parametrize("value", [0, 1e-300, 1e-39, 2.5])
def test_a_repetition_penalty_that_fp32_reads_as_zero_is_refused(client, value):
    """Case E06: it divided logits by zero."""
    response = client.post("/generate", json={"text": "a", "sampling_params": {"repetition_penalty": value}})
    assert response.status_code == 400
    assert "repetition_penalty" in response.text


@pytest.mark.parametrize("pattern", ["(" * 3000 + ")" * 3000, "(" * 150 + "a" + ")" * 150, ".*.*.*x"])
def test_a_stop_regex_that_would_stall_or_overflow_is_refused(client, pattern):
    """Case E06: deep nesting was a 500; three unbounded repeats kept the scheduler busy for minutes per token."""
    response = client.post("/v1/completions", json={"model": "m", "prompt": "a", "stop_regex": pattern})
    assert response.status_code == 400
    assert "stop_regex" in response.json()["message"]


@pytest.mark.parametrize("route", GENERATION_ROUTES)
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_without_end_is_refused_and_not_kept(client, route, declared, monkeypatch):
    monkeypatch.setattr(request_body, "MAX_BODY", 100_000)
    raw = json.dumps({**EVERY_PROMPT, "foo": "x" * 3_000_000}).encode()
    pieces = (raw[i : i + 65_536] for i in range(0, len(raw), 65_536))
    response = post_raw(client, route, raw if declared else pieces)
    assert response.status_code == 400
    assert f"{len(raw)} bytes, at most 100000" in response.json()["message"]
    assert post_raw(client, route, json.dumps(EVERY_PROMPT).encode()).status_code == 200


def test_messages_are_short_and_say_a_value_once(client):
    response = client.post("/generate", content=b"{}", headers={"content-type": "x" * 5000})
    assert response.status_code == 400
    assert len(response.text) < 300
    response = client.post("/v1/completions", json={"prompt": "a", "n": 0})
    assert response.json()["message"] == "n: must be at least 1, got 0"


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a":' * 5000, "[]", "{", "NaN", '{"a": 1' + "0" * 5000 + "}"])
def test_odd_arguments_of_a_call_in_the_history_are_refused(client, arguments):
    """Case E04: deep nesting in JSON text inside the JSON body was a 500."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    response = client.post("/v1/chat/completions", json={"model": "m", "messages": messages, "max_tokens": 2})
    assert response.status_code == 400
    assert "arguments" in response.json()["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"activities": [[]]},
        {"activities": [{}]},
        {"start_step": 2**70},
        {"num_steps": 2**64},
        {"output_dir": "/tmp/a\x00b"},
        {"output_dir": "/proc/nowhere"},
    ],
)
def test_odd_profile_requests_are_refused(client, body):
    """Unhashable, unsendable and impossible values were a 500 or ended the scheduler."""
    assert client.post("/start_profile", json=body).status_code == 400


def test_errors_are_readable_in_the_official_client(server):
    """Case E04: status and message arrive in ``BadRequestError``, before any chunk of a stream."""
    with OpenAI(base_url=f"{server.base_url}/v1", api_key="k", max_retries=0) as api:
        faults = (
            ({"temperature": -1}, "temperature"),
            ({"max_tokens": 10**6}, "maximum context length"),
            ({"logit_bias": {"99999999": 1}}, "99999999"),
            ({"logprobs": 100_000}, "100000"),
            ({"stop": ""}, "stop"),
        )
        for stream in (False, True):
            for fault, text in faults:
                with pytest.raises(BadRequestError, match=text):
                    api.completions.create(model="m", prompt="a", stream=stream, **fault)


def test_ids_on_the_wire_never_meet():
    """Case E03: a client id equal to the wire id of another request took over that request's place."""

    async def body():
        async with running_manager(small_tokenizer()) as (manager, _):
            manager._gone.update({"w", "w~2"})  # as after two clients that left

            async def ask(rid: str, token: int):
                params = {"max_new_tokens": 30}
                obj = GenerateReqInput(input_ids=[token], sampling_params=params, rid=rid, stream=True)
                last = None
                async for answer in manager.generate_request(obj):
                    last = answer
                return last["meta_info"]["id"], last["output_ids"]

            rids = ["w", "w~1", "w~2", "w~3", "w~1~4"]
            answers = await asyncio.gather(*(ask(rid, 40 + i) for i, rid in enumerate(rids)))
            assert answers == [(rid, [40 + i] * 30) for i, rid in enumerate(rids)]

    asyncio.run(asyncio.wait_for(body(), 20))
