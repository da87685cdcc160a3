"""The ``sgling`` command: dispatch, exit statuses, and how accepted runs are shown."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types

import pytest

import sgling
from sgling import cli, generate, launch_server


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sgling {sgling.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nothing"], ["bench"], ["bench", "nothing"], ["gate"], ["eval", "x"]])
def test_unknown_commands(argv, capsys):
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith("usage: sgling")


def test_every_command_leads_to_a_main():
    for name, command in cli.COMMANDS.items():
        assert callable(importlib.import_module(command.module).main), name


def test_usage_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)


def test_a_reader_that_leaves_gets_no_traceback():
    """``sgling bench serving | head -3``."""
    script = "from sgling import cli; cli._run = lambda *_: print('text') or 0; raise SystemExit(cli.main(['doctor']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_serve_starts_the_server_with_resolved_arguments(monkeypatch):
    started = []
    server = types.ModuleType("sgling.srt.entrypoints.http_server")
    server.launch_server = started.append
    monkeypatch.setitem(sys.modules, server.__name__, server)
    assert cli.main(["serve", "--device", "cpu", "--port", "1"]) == 0
    assert launch_server.main(["--device", "cpu", "--port", "2"]) == 0
    assert [(args.port, args.spec.enabled) for args in started] == [(1, True), (2, True)]


def test_serve_reports_what_cannot_be_served(capsys):
    assert cli.main(["serve", "m", "--pp-size", "2"]) == 1
    assert "sgling serve: error: --pp-size 2: not built yet (pipeline parallelism)" in capsys.readouterr().err


def chunk(text: str, tokens: int, **meta) -> dict:
    return {"text": text, "meta_info": {"completion_tokens": tokens, **meta}}


class FakeEngine:
    """Answers "Hello, you" in two steps."""

    def __init__(self, **server_args):
        self.server_args, self.stopped = server_args, False
        FakeEngine.last = self

    def generate(self, **request):
        self.request = request
        yield chunk("Hello", 1)
        yield chunk("Hello", 1)
        runs = {"spec_verify_ct": 1, "spec_num_correct_drafts": 1, "spec_accepted_runs": [1, 2]}
        yield chunk("Hello, you", 3, **runs)

    def shutdown(self):
        self.stopped = True


def test_generate_shows_runs(monkeypatch, capsys):
    monkeypatch.setattr(sgling, "Engine", FakeEngine, raising=False)
    assert cli.main(["generate", "hi", "--max-new-tokens", "3", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "[Hello][, you]\n"
    assert "3 tokens in" in shown.err
    assert "accept length 2.00 (1 verify steps)" in shown.err
    assert "accepted runs: 1 2" in shown.err
    engine = FakeEngine.last
    assert engine.server_args == {"device": "cpu"}
    assert (engine.request["prompt"], engine.request["stream"], engine.stopped) == ("hi", True, True)


def test_runs_alternate_in_colour_on_a_terminal():
    pieces = list(generate.show_runs([chunk("a", 1), chunk("ab", 2)], colour=True))
    assert pieces == ["\x1b[36ma\x1b[0m", "\x1b[33mb\x1b[0m"]


def test_generate_reports_errors(monkeypatch, capsys):
    assert cli.main(["generate", "hi", "--model-path", "/no/such/directory", "--chat"]) == 1
    assert "'/no/such/directory' not found" in capsys.readouterr().err
