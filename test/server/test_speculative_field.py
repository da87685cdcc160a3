"""``speculative`` of a request: read on every route, refused by name, and carried to the scheduler."""

from __future__ import annotations

import pytest

from server.live_server import LiveServer
from sgling.srt.managers.generate_req import GenerateReqInput, RequestError


@pytest.fixture(scope="module")
def server():
    live = LiveServer().start()
    yield live
    live.stop()


def caps(server) -> list[int | None]:
    """Widths the scheduler was told since the last call."""
    found = [message.speculative_max_width for message in server.scheduler.received]
    server.scheduler.received.clear()
    return found


@pytest.fixture(autouse=True)
def record(server):
    """Remember what the scripted scheduler receives."""
    scheduler = server.scheduler
    scheduler.received = []
    admit = type(scheduler).admit

    def recording(message):
        scheduler.received.append(message)
        admit(scheduler, message)

    scheduler.admit = recording
    yield
    del scheduler.admit


@pytest.mark.parametrize(
    ("value", "cap"),
    [(None, None), ({}, None), ({"enabled": True}, None), ({"enabled": False}, 1), ({"max_width": 3}, 3)],
)
def test_the_field_is_carried(server, value, cap):
    with server.client() as client:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}, "speculative": value}
        assert client.post("/generate", json=body).status_code == 200
        body = {"prompt": [5, 6], "model": "m", "max_tokens": 2, "speculative": value}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert caps(server) == [cap, cap]


def test_prompts_of_a_batch_may_differ(server):
    with server.client() as client:
        body = {
            "input_ids": [[5], [6]],
            "sampling_params": {"max_new_tokens": 1},
            "speculative": [{"max_width": 2}, {"enabled": False}],
        }
        assert client.post("/generate", json=body).status_code == 200
    assert caps(server) == [2, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"depth": 3}, "speculative has no 'depth'"),
        ({"max_width": 0}, "speculative.max_width must be an integer of at least 1, got 0"),
        ({"enabled": 1}, "speculative.enabled must be a boolean, got 1"),
        ({"enabled": False, "max_width": 4}, "1 or absent where enabled is false"),
        ("off", "speculative must be an object"),
    ],
)
def test_what_it_does_not_know_is_refused(value, message):
    with pytest.raises(RequestError, match=message):
        GenerateReqInput.from_json({"text": "a", "speculative": value})


def test_wider_than_the_server_is_refused(server):
    with server.client() as client:
        answer = client.post("/generate", json={"input_ids": [5], "speculative": {"max_width": 5}})
        assert (answer.status_code, "must be in [1, 4], got 5" in answer.text) == (400, True)
        answer = client.post("/v1/completions", json={"prompt": "a", "model": "m", "speculative": {"max_width": 5}})
        assert answer.status_code == 400
