"""The library engine over a scripted scheduler: same answers as the server, no web stack."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time

import pytest

from server.fake_scheduler import CRASH, MUTE, SLOW, FakeScheduler, create_fake_scheduler
from server.serving_helpers import small_tokenizer
from sgling import Engine
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.srt.managers.generate_req import RequestError

PARAMS = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    config = json.loads((ASSETS_DIR / "ling3-pico" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))
    small_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def make_engine(model_dir, factory=create_fake_scheduler, **args):
    return Engine(model_path=str(model_dir), device="cpu", scheduler_factory=factory, **args)


@pytest.fixture(scope="module")
def engine(model_dir):
    with make_engine(model_dir) as engine:
        yield engine


def test_generate(engine):
    answer = engine.generate("The fox", PARAMS)
    assert answer["text"] == small_tokenizer().decode(answer["output_ids"]) and len(answer["output_ids"]) == 8
    assert "index" not in answer
    answers = engine.generate(["The", "fox"], [{"max_new_tokens": 1}, {"max_new_tokens": 2}])
    assert [len(answer["output_ids"]) for answer in answers] == [1, 2]
    assert engine.generate(input_ids=[40, 41], sampling_params=PARAMS)["output_ids"] == [40, 41] * 4
    assert len(engine.generate("The", {**PARAMS, "n": 3})) == 3
    meta = engine.generate("The", PARAMS, return_logprob=True, top_logprobs_num=2, rid="mine")["meta_info"]
    assert len(meta["output_top_logprobs"]) == 8 and meta["id"] == "mine"


def test_stream(engine):
    chunks = list(engine.generate("The fox", PARAMS, stream=True))
    assert [len(chunk["output_ids"]) for chunk in chunks] == [3, 6, 8]
    chunks = engine.generate(input_ids=[SLOW], sampling_params={"max_new_tokens": 100}, stream=True)
    next(chunks)
    chunks.close()
    deadline = time.monotonic() + 3
    while engine.get_server_info()["internal_states"][0]["num_running_reqs"]:
        assert time.monotonic() < deadline


def test_async(engine):
    async def body():
        answer = await engine.async_generate("The fox", PARAMS)
        assert len(answer["output_ids"]) == 8
        chunks = [chunk async for chunk in await engine.async_generate("The fox", PARAMS, stream=True)]
        assert chunks[-1]["output_ids"] == answer["output_ids"] and len(chunks) == 3
        answers = await asyncio.gather(*(engine.async_generate("The", PARAMS) for _ in range(5)))
        assert len({answer["text"] for answer in answers}) == 1

    asyncio.run(body())


def test_errors(engine):
    with pytest.raises(RequestError, match="-1"):
        engine.generate(input_ids=[-1])
    with pytest.raises(RequestError, match="foo"):
        list(engine.generate("a", {"foo": 1}, stream=True))
    with pytest.raises(TypeError, match="nonsense"):
        engine.generate("a", nonsense=1)
    with pytest.raises(TypeError, match="unknown_flag"):
        Engine(unknown_flag=1)


def test_abort_and_flush(engine):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(engine.generate(input_ids=[MUTE], rid="x")))
    thread.start()
    while not engine.get_server_info()["internal_states"][0]["num_running_reqs"]:
        time.sleep(0.005)
    assert engine.flush_cache() is False
    engine.abort_request("x")
    thread.join(5)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.flush_cache() is True
    assert engine.get_server_info()["max_total_num_tokens"] == 4096


def test_death_and_shutdown(model_dir):
    engine = make_engine(model_dir)
    with pytest.raises(RequestError, match="scripted crash"):
        engine.generate(input_ids=[CRASH])
    with pytest.raises(RequestError, match="scripted crash"):
        engine.generate("a")
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("a")


def test_failing_start(model_dir):
    def broken(job, channel, parallel):
        raise ValueError("no such weights")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no such weights"):
        make_engine(model_dir, broken)
    assert threading.active_count() == before


def test_shutdown_ends_running_requests(model_dir):
    schedulers = []

    def factory(job, channel, parallel):
        schedulers.append(FakeScheduler(channel))
        return schedulers[0]

    engine = make_engine(model_dir, factory)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(engine.generate(input_ids=[MUTE])))
    thread.start()
    while not schedulers[0].live:
        time.sleep(0.005)
    engine.shutdown()
    thread.join(5)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_several_ranks_run_in_processes(model_dir):
    with make_engine(model_dir, tp_size=2) as engine:
        assert len(engine.generate("The fox", PARAMS)["output_ids"]) == 8
        with pytest.raises(RequestError, match="scheduler died"):
            engine.generate(input_ids=[CRASH])


def test_imports_without_the_web_stack():
    code = (
        "import sys\n"
        "for name in ('fastapi', 'uvicorn', 'uvloop', 'zmq', 'pydantic', 'starlette', 'prometheus_client', 'httpx'):\n"
        "    sys.modules[name] = None\n"
        "import sgling\n"
        "sgling.Engine\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})
