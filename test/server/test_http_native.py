"""Native HTTP routes over real sockets: framing, error shapes, keys, disconnects."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest

from server.fake_scheduler import CONTEXT_LEN, CRASH, MUTE, REFUSE, SLOW
from server.live_server import LiveServer
from server.serving_helpers import small_tokenizer

TEXT = "The quick 한국 fox"


@pytest.fixture(scope="module")
def server():
    live = LiveServer(with_metrics=True).start()
    yield live
    live.stop()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def wait_for(condition, timeout_s: float = 3.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def events(response: httpx.Response) -> list:
    """Payloads of a stream; checks the framing byte for byte."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames[-1] == "" and frames[-2] == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_generate(client, method):
    params = {"max_new_tokens": 40, "ignore_eos": True}
    response = client.request(method, "/generate", json={"text": TEXT, "sampling_params": params, "rid": "me"})
    assert response.status_code == 200
    answer = response.json()
    assert sorted(answer) == ["meta_info", "output_ids", "text"]
    assert answer["text"] == small_tokenizer().decode(answer["output_ids"])
    assert answer["meta_info"]["id"] == "me" and answer["meta_info"]["completion_tokens"] == 40


def test_batch_is_a_list_in_order(client):
    body = {"text": ["The", "fox"], "sampling_params": {"max_new_tokens": 2, "n": 2}}
    answers = client.post("/generate", json=body).json()
    assert [answer["text"][0] for answer in answers] == ["T", "T", "f", "f"]
    assert all("index" not in answer for answer in answers)
    assert isinstance(client.post("/generate", json={"text": ["The"]}).json(), list)


def test_stream(client):
    body = {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 20}}
    chunks = events(client.post("/generate", json=body))
    assert len(chunks) == 7
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    batch = events(client.post("/generate", json={**body, "text": ["The", "fox"]}))
    assert {chunk["index"] for chunk in batch} == {0, 1}


def test_stream_flushes_every_event(server):
    """The first event arrives while the request still runs."""
    body = {"input_ids": [SLOW, 50], "stream": True, "sampling_params": {"max_new_tokens": 240}}
    with server.client() as client, client.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()  # kept: dropping it would close the connection
        assert json.loads(next(lines).removeprefix("data: "))["meta_info"]["completion_tokens"] == 3
        assert server.manager.num_live == 1


MALFORMED = [b'{"a":', b"[]", b"null", b'"x"', b"", b"\xff\xfe", b'{"text": "\\ud800"}', b"[" * 100_000, b"1" * 5000]


@pytest.mark.parametrize("content", MALFORMED, ids=lambda content: repr(content[:12]))
def test_malformed_bodies(client, content):
    for path in ("/generate", "/tokenize", "/detokenize", "/abort_request"):
        response = client.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        error = response.json()
        assert error["object"] == "error" and error["type"] == "Bad Request" and error["code"] == 400
        assert isinstance(error["message"], str) and "Traceback" not in error["message"]


def test_bad_requests(client):
    message = client.post("/generate", json={}).json()["error"]["message"]
    assert "text or input_ids" in message
    response = client.post("/generate", json={"text": "a", "stream": "maybe"})
    assert response.status_code == 400 and "maybe" in response.json()["error"]["message"]
    response = client.post("/generate", json={"text": "a", "sampling_params": {"foo": 1}})
    assert response.status_code == 400 and "foo" in response.json()["error"]  # a bare string
    response = client.post("/generate", content=b'{"text":"a","sampling_params":{"temperature":NaN}}')
    assert response.status_code == 400 and "temperature" in response.json()["error"]["message"]
    response = client.post("/generate", content=b"text=a", headers={"content-type": "text/plain"})
    assert response.status_code == 400 and "text/plain" in response.json()["message"]
    response = client.post("/generate", json={"input_ids": [5] * CONTEXT_LEN})
    assert response.status_code == 400 and str(CONTEXT_LEN) in response.json()["error"]["message"]
    assert client.get("/health").status_code == 200


def test_refused_stream_is_an_event(client):
    for body, code, retryable in (({"input_ids": [-1]}, 400, False), ({"input_ids": [REFUSE]}, 500, False)):
        response = client.post("/generate", json={**body, "stream": True})
        assert response.status_code == 200
        *_, last = events(response)
        error = last["error"]
        assert error["code"] == code and error["retryable"] is retryable
        assert error["type"] == ("invalid_request_error" if code == 400 else "internal_server_error")
    assert client.post("/generate", json={"input_ids": [REFUSE]}).status_code == 500


def test_unknown_routes_and_methods(client):
    assert client.get("/nope").json() == {"detail": "Not Found"}
    assert client.get("/nope").status_code == 404
    response = client.get("/generate")
    assert response.status_code == 405 and response.json() == {"detail": "Method Not Allowed"}


def test_abort(client, server):
    answers = []
    body = {"input_ids": [SLOW, 50], "rid": "x", "sampling_params": {"max_new_tokens": 200}}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{server.base_url}/generate", json=body)))
    thread.start()
    wait_for(lambda: server.manager.num_live == 1)
    assert client.post("/generate", json={"text": "a", "rid": "x"}).status_code == 400
    time.sleep(0.05)
    for bad in ({}, {"rid": 5}, {"abort_all": "yes"}):
        assert client.post("/abort_request", json=bad).status_code == 400
    assert client.post("/abort_request", json={"rid": "nope"}).content == b""
    assert client.post("/abort_request", json={"rid": "x"}).status_code == 200
    thread.join(5)
    assert answers[0].status_code == 200
    answer = answers[0].json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(answer["output_ids"]) < 200


@pytest.mark.parametrize("kind", [SLOW, MUTE])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_at_once(server, kind, stream):
    """Before and after the first event, streaming or not: the request is gone well within a second."""
    body = json.dumps({"input_ids": [kind, 50], "stream": stream, "sampling_params": {"max_new_tokens": 200}}).encode()
    lines = ["POST /generate HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "", ""])
    before = len(server.scheduler.aborted)
    for _ in range(5):
        with socket.create_connection(server.address) as connection:
            connection.sendall(head.encode() + body)
            wait_for(lambda: server.manager.num_live == 1)
            if stream and kind == SLOW:
                connection.recv(2000)
        begin = time.monotonic()
        wait_for(lambda: server.manager.num_live == 0 and not server.scheduler.live)
        assert time.monotonic() - begin < 1.0
    assert len(server.scheduler.aborted) == before + 5


def test_flush_cache(client, server):
    for method in ("GET", "POST"):
        response = client.request(method, "/flush_cache")
        assert response.status_code == 200 and response.text.startswith("Cache flushed.")
    for bad in ("x", "-1", "nan", "inf"):
        assert client.get(f"/flush_cache?timeout={bad}").status_code == 400
    body = {"input_ids": [MUTE], "stream": True}
    with server.client() as other, other.stream("POST", "/generate", json=body):
        wait_for(lambda: server.scheduler.live)
        response = client.get("/flush_cache")
        assert response.status_code == 400 and "busy" in response.text
    wait_for(lambda: not server.scheduler.live)


def test_health_and_readiness(client, server):
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        response = client.get(path)
        assert response.status_code == 200 and response.content == b""
    assert "running" in client.get("/").text
    server.manager.ready = False
    try:
        for path in ("/health", "/health_generate", "/ready"):
            assert client.get(path).status_code == 503
        assert client.get("/v1/models").status_code == 200
    finally:
        server.manager.ready = True


def test_models(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == card["root"] == "ling3-pico" and card["max_model_len"] == CONTEXT_LEN
    assert client.get("/v1/models/ling3-pico").json() == card
    response = client.get("/v1/models/org/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found" and response.json()["error"]["param"] == "model"


def test_info(client):
    for path in ("/model_info", "/get_model_info"):
        info = client.get(path).json()
        assert info["is_generation"] is True and info["tokenizer_path"] == "/model"
        assert info["architectures"] == ["BailingMoeV3ForCausalLM"] and info["model_type"] == "bailing_hybrid"
    for path in ("/server_info", "/get_server_info"):
        info = client.get(path).json()
        assert info["internal_states"][0]["avg_spec_accept_length"] == 2.5
        assert info["model_path"] == "ling3-pico" and info["tp_size"] == 1 and info["random_seed"] == 1
        assert info["speculative_num_draft_tokens"] == 4 and info["max_total_num_tokens"] == 4096
        assert info["version"] and info["startup_time"] == 1.5


def test_metrics(client):
    client.post("/generate", json={"text": "a"})
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    assert "sglang:num_requests_total" in response.text and "sglang:spec_accept_length" in response.text


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(client, prefix):
    tokens = small_tokenizer().encode(TEXT).ids
    answer = client.post(f"{prefix}/tokenize", json={"prompt": TEXT}).json()
    assert answer == {"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT_LEN}
    answer = client.post(f"{prefix}/tokenize", json={"prompt": [TEXT, ""]}).json()
    assert answer["tokens"] == [tokens, []] and answer["count"] == [len(tokens), 0]
    assert client.post(f"{prefix}/detokenize", json={"tokens": tokens}).json() == {"text": TEXT}
    assert client.post(f"{prefix}/detokenize", json={"tokens": [tokens, []]}).json() == {"text": [TEXT, ""]}
    assert client.post(f"{prefix}/detokenize", json={"tokens": [10**9]}).json() == {"text": ""}
    special = {"tokens": [0, 1], "skip_special_tokens": False}
    assert client.post(f"{prefix}/detokenize", json=special).json() == {"text": "<pad><end>"}
    for bad in ({"tokens": "x"}, {"tokens": [1, "x"]}, {}, {"tokens": [1], "skip_special_tokens": "no"}):
        assert client.post(f"{prefix}/detokenize", json=bad).status_code == 400
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answer = client.post(f"{prefix}/tokenize", json=chat).json()
    assert "hi" in small_tokenizer().decode(answer["tokens"]) and answer["count"] == len(answer["tokens"]) > 2
    for bad in ({}, {"prompt": 5}, {"prompt": ["a", 5]}, {"messages": []}):
        assert client.post(f"{prefix}/tokenize", json=bad).status_code == 400


def test_cors(client):
    response = client.get("/v1/models", headers={"origin": "http://elsewhere"})
    assert response.headers["access-control-allow-origin"] == "*"
    preflight = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
    assert client.options("/generate", headers=preflight).status_code == 200


def test_keys():
    live = LiveServer(api_key="k", admin_api_key="root").start()
    try:
        with live.client() as client:
            for path in ("/health", "/ready", "/metrics"):
                assert client.get(path).status_code != 401
            assert client.options("/generate").status_code != 401
            for key in (None, "Bearer wrong", "k", "Bearer root", "Bearer k\u00e9".encode()):
                headers = {} if key is None else {"authorization": key}
                response = client.get("/v1/models", headers=headers)
                assert response.status_code == 401 and response.json() == {"error": "Unauthorized"}
            user, admin = {"authorization": "Bearer k"}, {"authorization": "Bearer root"}
            assert client.get("/v1/models", headers=user).status_code == 200
            assert client.get("/flush_cache", headers=user).status_code == 401
            assert client.get("/flush_cache", headers=admin).status_code == 200
            assert client.get("/metrics").status_code == 404  # open, but metrics are off
            info = client.get("/server_info", headers=user).json()
            assert info["api_key"] == info["admin_api_key"] == "***"
    finally:
        live.stop()


def test_incremental_streaming():
    live = LiveServer(incremental_streaming_output=True).start()
    try:
        with live.client() as client:
            body = {"text": [TEXT, "fox"], "sampling_params": {"max_new_tokens": 20}}
            whole = client.post("/generate", json=body).json()
            chunks = events(client.post("/generate", json={**body, "stream": True}))
        for index, answer in enumerate(whole):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert "".join(chunk["text"] for chunk in mine) == answer["text"]
            assert sum((chunk["output_ids"] for chunk in mine), []) == answer["output_ids"]
    finally:
        live.stop()


def test_dead_scheduler():
    """Waiting requests fail, health is red, and nothing hangs."""
    live = LiveServer().start()
    try:
        with live.client() as client, live.client() as other:
            with other.stream("POST", "/generate", json={"input_ids": [MUTE], "stream": True}) as waiting:
                wait_for(lambda: live.manager.num_live == 1)
                response = client.post("/generate", json={"input_ids": [CRASH]})
                assert response.status_code == 500 and "scripted crash" in response.json()["error"]["message"]
                waiting.read()
                (error,) = events(waiting)
                assert error["error"]["code"] == 500
            assert client.get("/health").status_code == 503
            assert client.get("/ready").status_code == 503
            assert client.post("/generate", json={"text": "a"}).status_code == 503
            assert client.get("/server_info").status_code == 503
    finally:
        live.stop()
