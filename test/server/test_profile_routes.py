"""``/start_profile`` and ``/stop_profile``: upstream's fields, refusals by name, and files of a real engine."""

from __future__ import annotations

import pytest

import sgling
from server.live_server import LiveServer
from sgling.srt.managers.generate_req import RequestError
from sgling.srt.managers.io_struct import ProfileReqOutput
from sgling.srt.managers.profile_req import start_request
from sgling.srt.observability.step_trace import read_trace


def test_upstreams_body_is_read():
    body = {"output_dir": "/x", "num_steps": 5, "activities": ["CPU", "GPU"], "profile_by_stage": True, "merge": 1}
    request = start_request({**body, "start_step": None})
    assert (request.output_dir, request.num_steps, request.start_step) == ("/x", 5, 0)
    assert request.activities == ["CPU", "GPU"] and not request.stop


@pytest.mark.parametrize(
    "body",
    [{"num_steps": 0}, {"start_step": -1}, {"activities": ["MEM"]}, {"output_dir": 3}, {"profile_prefix": "a/b"}],
)
def test_wrong_fields_are_named(body):
    with pytest.raises(RequestError, match=next(iter(body))):
        start_request(body)


def test_the_routes_pass_on_and_answer(monkeypatch):
    server = LiveServer().start()
    asked = []

    async def profile(request):
        asked.append(request)
        if request.stop:
            return ProfileReqOutput(request.req_id, True, "Stop profiling.", ["/x/a.trace.json.gz"])
        return ProfileReqOutput(request.req_id, len(asked) == 1, "Start profiling." if len(asked) == 1 else "running")

    server.manager.control.profile = profile
    with server.client() as client:
        started = client.post("/start_profile", json={"num_steps": 3})
        assert (started.status_code, started.text, asked[0].num_steps) == (200, "Start profiling.\n", 3)
        assert client.get("/start_profile").status_code == 400
        stopped = client.post("/stop_profile")
        assert (stopped.status_code, stopped.text) == (200, "Stop profiling.\n/x/a.trace.json.gz\n")
        assert client.post("/start_profile", json={"num_steps": "x"}).status_code == 400
    server.stop()


def test_an_engine_is_profiled(tmp_path):
    with sgling.Engine(load_format="dummy", device="cpu") as engine:
        with pytest.raises(RuntimeError, match="not in progress"):
            engine.stop_profile()
        engine.start_profile(output_dir=str(tmp_path))
        engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
        (path,) = engine.stop_profile()
    spans, facts = read_trace(tmp_path / path)
    assert facts["device"] == "cpu" and any(span.name == "verify" for span in spans)
