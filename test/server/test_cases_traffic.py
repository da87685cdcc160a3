"""Many clients at once that leave, abort, flush and reuse ids: everything comes back (cases E03, F01, F02, F05)."""

from __future__ import annotations

import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from model.tiny_model import write_tiny_checkpoint
from server.real_server import pool, real_server, requests_inside, wait_idle, wait_until

POOLS = [
    {"max_total_tokens": 192, "chunked_prefill_size": 7},
    {"max_total_tokens": 512, "page_size": 64, "chunked_prefill_size": 64},
    {"page_size": 16, "chunked_prefill_size": -1, "disable_overlap_schedule": True},
]
ALLOWED = (200, 400)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


class Client:
    """One client that behaves in some way, chosen by its number."""

    def __init__(self, base_url: str, address: tuple[str, int], number: int):
        self._address = address
        self._rng = random.Random(number)
        self._http = httpx.Client(base_url=base_url, timeout=60)

    def act(self) -> None:
        """Do one thing."""
        actions = (self.answer, self.leave_stream, self.leave_early, self.abort, self.flush, self.several, self.chat)
        with self._http:
            self._rng.choice(actions)()

    def _body(self, tokens: int) -> dict:
        rng = self._rng
        params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": rng.choice([0, 1.0])}
        prompt = [rng.randrange(4, 290) for _ in range(rng.choice([1, 5, 40, 90]))]
        rid = rng.choice([None, None, "a", "b", "a~1", "a~2"])
        return {"input_ids": prompt, "sampling_params": params, "rid": rid, "return_logprob": rng.random() < 0.3}

    def answer(self) -> None:
        """An ordinary request."""
        response = self._http.post("/generate", json=self._body(12))
        assert response.status_code in ALLOWED, response.text
        if response.status_code == 200:
            answer = response.json()
            reason = answer["meta_info"]["finish_reason"]["type"]
            assert reason == "abort" or len(answer["output_ids"]) == 12

    def several(self) -> None:
        """Choices of one prompt."""
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 8, "n": 3, "ignore_eos": True}
        assert self._http.post("/v1/completions", json=body).status_code == 200

    def chat(self) -> None:
        """A streamed chat that is read to its end."""
        body = {"model": "m", "input_ids": [5, 6], "max_tokens": 8, "stream": True, "ignore_eos": True}
        text = self._http.post("/v1/chat/completions", json=body).text
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":"') == 1

    def leave_stream(self) -> None:
        """Read a few chunks, then go."""
        body = {**self._body(1000), "stream": True}
        with self._http.stream("POST", "/generate", json=body) as response:
            for _ in zip(range(self._rng.randrange(4)), response.iter_lines(), strict=False):
                pass

    def leave_early(self) -> None:
        """Go before the first byte, or in the middle of the own request."""
        content = json.dumps(self._body(1000)).encode()
        sent = content[: self._rng.choice([3, len(content)])]
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        with socket.create_connection(self._address) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + sent)

    def abort(self) -> None:
        """Abort somebody."""
        rid = self._rng.choice(["a", "b", "a~1", "nobody"])
        assert self._http.post("/abort_request", json={"rid": rid}).status_code == 200

    def flush(self) -> None:
        """Flush while others run."""
        assert self._http.post("/flush_cache").status_code in ALLOWED


@pytest.mark.parametrize("options", POOLS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()))
def test_odd_clients_leave_nothing_behind(model_dir, options):
    run_traffic(model_dir, options, clients=70)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", POOLS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()))
def test_a_long_siege(model_dir, options):
    run_traffic(model_dir, options, clients=3000)


def ids_and_runs(client, body: dict) -> tuple[list[int], list[int]]:
    """What a request says, and how many tokens each of its steps accepted."""
    answer = client.post("/generate", json=body).json()
    return answer["output_ids"], answer["meta_info"]["spec_accepted_runs"]


def run_traffic(model_dir, options: dict, clients: int) -> None:
    """Let clients act, 16 at a time; then nothing may be left, and a probe must answer and accept as before."""
    server = real_server(model_dir, max_running_requests=6, **options).start()
    probe = {"text": "The quick", "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}
    try:
        with server.client() as client:
            before, answer = pool(client), ids_and_runs(client, probe)
            with ThreadPoolExecutor(16) as threads:
                numbers = range(clients)
                list(threads.map(lambda number: Client(server.base_url, server.address, number).act(), numbers))
            wait_idle(client)
            assert client.post("/flush_cache").text.startswith("Cache flushed.")
            assert pool(client) == before
            assert ids_and_runs(client, probe) == answer
            assert client.get("/health").status_code == 200
    finally:
        server.stop()


def test_abort_of_everything_ends_every_request_on_its_own_connection(model_dir):
    server = real_server(model_dir, max_running_requests=3).start()
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
    answers: list[dict] = []
    try:
        with server.client() as client:

            def send() -> None:
                answers.append(httpx.post(f"{server.base_url}/generate", json=body, timeout=60).json())

            threads = [threading.Thread(target=send) for _ in range(6)]
            for thread in threads:
                thread.start()
            wait_until(lambda: requests_inside(client) == 6)
            assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
            for thread in threads:
                thread.join(20)
            assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 6
            wait_idle(client)
    finally:
        server.stop()
