"""The launcher with real processes: start-up order, drain, interrupts, a scheduler that dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import pytest

from server.fake_scheduler import CRASH, MUTE, SLOW
from server.serving_helpers import small_tokenizer
from sgling.cli import main as cli_main
from sgling.launch_server import main as launch_main
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.entrypoints.http_server import bind_socket

TEST_DIR = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A directory with a config and the small tokenizer, no weights."""
    directory = tmp_path_factory.mktemp("model")
    config = json.loads((ASSETS_DIR / "ling3-pico" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))
    small_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


class Launched:
    """A server process and its log."""

    def __init__(self, model_dir: Path, *flags: str):
        path = os.pathsep.join([str(TEST_DIR), *sys.path])
        self.scratch = tempfile.mkdtemp()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "server.serve_fake",
                "--model-path",
                str(model_dir),
                "--device",
                "cpu",
                "--port",
                "0",
            ]
            + list(flags),
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": self.scratch},
            start_new_session=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")), daemon=True).start()

    def wait_for_line(self, pattern: str, timeout_s: float = 40.0) -> re.Match:
        """First log line that matches."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            if self.process.poll() is not None:
                time.sleep(0.2)
                if not any(re.search(pattern, line) for line in self.lines):
                    break
            time.sleep(0.02)
        raise AssertionError(f"no line {pattern!r} in:\n{''.join(self.lines)}")

    def ready(self) -> httpx.Client:
        """Wait until the server is up; returns a client."""
        port = self.wait_for_line(r"Listening on http://127.0.0.1:(\d+)")[1]
        self.wait_for_line("fired up and ready to roll")
        return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)

    def children(self) -> list[int]:
        """Process ids below the server."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def schedulers(self) -> list[int]:
        """Process ids of the scheduler processes."""
        return [pid for pid in self.children() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def status(self, timeout_s: float = 15.0) -> int:
        """Exit status; every child must be gone too."""
        children = self.children() if self.process.poll() is None else []
        status = self.process.wait(timeout_s)
        for pid in children:
            deadline = time.monotonic() + 3
            while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                assert time.monotonic() < deadline, f"child {pid} survives"
                time.sleep(0.02)
        return status


@pytest.fixture
def launch(model_dir):
    """Starts servers; what is left at the end is killed."""
    started: list[Launched] = []

    def start(*flags: str) -> Launched:
        started.append(Launched(model_dir, *flags))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
        shutil.rmtree(server.scratch, ignore_errors=True)


def in_background(client: httpx.Client, body: dict) -> tuple[threading.Thread, list[httpx.Response]]:
    """Send a request from a thread."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(client.post("/generate", json=body)))
    thread.start()
    return thread, answers


def wait_for_running(client: httpx.Client, count: int) -> None:
    deadline = time.monotonic() + 5
    while client.get("/server_info").json()["internal_states"][0]["num_running_reqs"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_serve_then_sigterm_to_the_group_drains(launch):
    server = launch("--enable-metrics")
    with server.ready() as client:
        assert client.get("/health").status_code == 200
        seen = client.get("/server_info").json()["internal_states"][0]["seen"]
        assert len([rid for rid in seen if not rid.startswith("HEALTH_CHECK")]) == 1  # the warm-up
        huge = {"text": "a", "sampling_params": {"custom_params": {"x": 10**30}}}  # no message can carry it
        assert client.post("/generate", json=huge).status_code == 400
        body = {"input_ids": [SLOW, 40], "sampling_params": {"max_new_tokens": 90}}  # 0.6 s
        thread, answers = in_background(client, body)
        wait_for_running(client, 1)
        os.killpg(server.process.pid, signal.SIGTERM)  # schedulers get it too, as from a service manager
        server.wait_for_line("draining")
        os.killpg(server.process.pid, signal.SIGTERM)  # a second one changes nothing
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        late = client.post("/generate", json={"text": "late", "sampling_params": {"max_new_tokens": 3}})
        assert late.status_code == 200
        thread.join(10)
        assert len(answers[0].json()["output_ids"]) == 90
    assert server.status() == 0


def test_a_drain_ends_at_its_time_limit(launch):
    server = launch("--skip-server-warmup", "--drain-timeout", "0.5")
    with server.ready() as client:
        thread, answers = in_background(client, {"input_ids": [MUTE]})
        wait_for_running(client, 1)
        server.process.send_signal(signal.SIGTERM)
        thread.join(10)
        assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.status() == 143
    server.wait_for_line("--drain-timeout is over: 1 requests are aborted")


def test_a_drain_with_nothing_to_wait_for_is_no_abort_however_short_its_time(launch):
    server = launch("--skip-server-warmup", "--drain-timeout", "0.2")
    with server.ready():
        server.process.send_signal(signal.SIGTERM)
    assert server.status() == 0


def test_a_drain_does_not_wait_for_an_engine_that_is_stuck(launch, monkeypatch):
    """Without a limit it hung for ever, with nobody left who could answer."""
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "1")
    server = launch("--skip-server-warmup")
    with server.ready() as client:
        thread, answers = in_background(client, {"input_ids": [MUTE]})
        wait_for_running(client, 1)
        os.kill(server.schedulers()[0], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("draining")
        assert server.status() == 1
        thread.join(5)
        assert answers[0].status_code == 503
    server.wait_for_line("no sign of life for 1 s")


def test_a_drain_waits_for_an_engine_that_is_only_slow(launch, monkeypatch):
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "0.3")
    server = launch("--skip-server-warmup", "--drain-timeout", "30")
    with server.ready() as client:
        body = {"input_ids": [SLOW, 40], "sampling_params": {"max_new_tokens": 240}}  # 1.6 s
        thread, answers = in_background(client, body)
        wait_for_running(client, 1)
        server.process.send_signal(signal.SIGTERM)
        thread.join(10)
        assert len(answers[0].json()["output_ids"]) == 240
    assert server.status() == 0


@pytest.mark.parametrize("main", [launch_main, cli_main])
def test_an_interrupt_before_the_server_runs_is_no_traceback(main, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ServerArgs, "from_cli", interrupt)
    assert main(["serve"]) == 130


def test_sigint_ends_the_tree(launch):
    server = launch("--skip-server-warmup")
    with server.ready() as client:
        assert client.get("/server_info").json()["internal_states"][0]["seen"] == []
        thread, answers = in_background(client, {"input_ids": [MUTE]})
        wait_for_running(client, 1)
        server.process.send_signal(signal.SIGINT)
        thread.join(10)
        assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.status() == 130


@pytest.mark.parametrize("how", ["crash", "term", "kill"])
def test_dead_scheduler_takes_the_server_down(launch, how):
    server = launch("--skip-server-warmup")
    with server.ready() as client:
        thread, answers = in_background(client, {"input_ids": [MUTE]})
        wait_for_running(client, 1)
        if how == "crash":
            client.post("/generate", json={"input_ids": [CRASH]})
        else:
            (pid,) = server.schedulers()
            # alone, without the parent, SIGTERM is an order to end, not a drain
            os.kill(pid, signal.SIGTERM if how == "term" else signal.SIGKILL)
        thread.join(5)
        message = answers[0].json()["error"]["message"]
        assert answers[0].status_code == 500 and "scheduler died" in message
        assert ("scripted crash" if how == "crash" else "exit code") in message
        assert client.get("/health").status_code == 503
    assert server.status() == 1


def test_sigterm_during_start_up(launch):
    server = launch()
    deadline = time.monotonic() + 30
    while not server.schedulers():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.status() == 143
    assert not any("Traceback" in line for line in server.lines)


def test_idle_server_sleeps_and_leaves_nothing_behind(launch):
    server = launch("--skip-server-warmup")
    with server.ready() as client:
        assert client.get("/health").status_code == 200
        pids = [server.process.pid, *server.children()]
        before = sum(_cpu_seconds(pid) for pid in pids)
        time.sleep(1.0)
        assert sum(_cpu_seconds(pid) for pid in pids) - before < 0.1
    pids = server.children()
    assert server.schedulers()
    assert list(Path(server.scratch).glob("sgling-*"))
    server.process.kill()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(Path(server.scratch).glob("sgling-*"))


def test_taken_port_is_refused():
    """Found when binding, before any weights are loaded."""
    first = bind_socket("127.0.0.1", 0)
    first.listen()
    port = first.getsockname()[1]
    with pytest.raises(ServerArgsError, match=f"--port {port}"):
        bind_socket("127.0.0.1", port)
    first.close()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
