"""Values of server flags on a command line and in a file: what is read, and what is refused with which words."""

from __future__ import annotations

import shlex

import pytest

from sgling.srt.config.flags import ServerArgsError, parse_int
from sgling.srt.config.server_args import ServerArgs


def resolve(line: str) -> ServerArgs:
    return ServerArgs.from_cli(shlex.split(f"--device cpu {line}"))


@pytest.mark.parametrize(
    "line",
    [
        "--seed 1",
        "--mamba-scheduler-strategy x",
        "--cuda-graph-max-bs 4",
        "--cuda-graph-bs 4",
        "--speculative-draft x",
        "--no-such-flag",
        "--tp four",
        "--tp",
        "--dtype int8",
        "--reasoning-parser qwen3",
        "--json-model-override-args [1]",
        "model --model-path model",
        "model model",
    ],
)
def test_usage_errors_exit_with_status_2(line, capsys):
    with pytest.raises(SystemExit) as caught:
        ServerArgs.parse(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: sgling serve")


def test_abbreviations_aliases_and_suffixes():
    args = ServerArgs.parse("--tp 2 --model m --context-len 4k --max-total 1.5k --speculative-num-s 2".split())
    assert (args.tp_size, args.model_path, args.context_length) == (2, "m", 4000)
    assert (args.max_total_tokens, args.speculative_num_steps) == (1500, 2)
    assert ServerArgs.parse(["--tensor-parallel-size", "8"]).tp_size == 8


@pytest.mark.parametrize(("text", "value"), [("4k", 4000), ("4K", 4096), ("2m", 2_000_000), ("1G", 2**30), ("-1", -1)])
def test_integer_suffixes(text, value):
    assert parse_int(text) == value


@pytest.mark.parametrize("text", ["1.0001k", "k", "4kk", "1.5"])
def test_bad_integers(text):
    with pytest.raises(ValueError):
        parse_int(text)


def test_positional_model_is_for_serve_only():
    assert ServerArgs.parse(["dir", "--tp", "2"]).model_path == "dir"
    assert ServerArgs.parse(["--tp", "2", "dir"]).model_path == "dir"
    with pytest.raises(SystemExit):
        ServerArgs.parse(["dir"], "python -m sgling.launch_server", None)


@pytest.mark.parametrize(
    "line",
    [
        "--page-size 65",
        "--page-size 0",
        "--chunked-prefill-size 0",
        "--max-running-requests 0",
        "--mem-fraction-static 1.5",
        "--port 70000",
        "--stream-interval 0",
        "--watchdog-timeout 0",
        "--watchdog-timeout nan",
        "--drain-timeout -1",
        "--drain-timeout nan",
        "--cuda-graph-bs-decode 0",
        "--cuda-graph-bs-decode 4 -2",
        "--host ''",
        "--api-key ''",
        "--api-key é",
        "--admin-api-key 'a b'",
        "--model-path ''",
        "--speculative-dspark-block-size 0",
        "--speculative-draft-model-path ''",
        "--dtype half",
    ],
)
def test_values_out_of_range(line):
    with pytest.raises(ServerArgsError, match=line.split()[0]):
        resolve(line)


@pytest.mark.parametrize("line", ["--speculative-adaptive --speculative-depth confidence",
                                  "--skip-server-warmup --speculative-smoke on"])  # fmt: skip
def test_flags_that_contradict_each_other(line):
    with pytest.raises(ServerArgsError, match="contradicts"):
        resolve(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-running-requests abc", "argument --max-running-requests: 'abc' is not an integer"),
        ("--drain-timeout soon", "argument --drain-timeout: 'soon' is not a number"),
        ("--json-model-override-args []", "argument --json-model-override-args: '[]' is not a JSON object"),
        (f"--json-model-override-args {'[' * 50_000}", "is not a JSON object"),
        ("--log-level-http loud", "argument --log-level-http: invalid choice: 'loud'"),
    ],
)
def test_usage_errors_say_what_was_wanted(line, message, capsys):
    with pytest.raises(SystemExit) as caught:
        resolve(line)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_values_in_range():
    args = resolve("--page-size 64 --chunked-prefill-size -1 --max-queued-requests 0 --dtype bfloat16 --random-seed 7")
    assert (args.page_size, args.chunked_prefill_size, args.max_queued_requests) == (64, -1, 0)
    assert (args.dtype, args.random_seed) == ("bfloat16", 7)
    assert resolve("--dtype float").dtype == "float32"
    assert resolve("--reasoning-parser none --tool-call-parser auto").reasoning_parser is None


def test_config_file(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(
        "model-path: m\ntp: 4\nmax_running_requests: 8\nenable-metrics: true\nlog-requests: false\n"
        "json-model-override-args: {a: 1}\ncuda-graph-bs-decode: [1, 2]\nrevision: null\n"
    )
    args = ServerArgs.parse(["--config", str(file), "--tp-size", "2"])
    assert (args.model_path, args.tp_size, args.max_running_requests) == ("m", 2, 8)
    assert (args.enable_metrics, args.log_requests, args.revision) == (True, False, None)
    assert (args.json_model_override_args, args.cuda_graph_bs_decode) == ({"a": 1}, [1, 2])


@pytest.mark.parametrize("text", ["no-such-flag: 1\n", "- 1\n", "tp: [\n", "tp: four\n", b"\xff\xfe", None])
def test_bad_config_file(tmp_path, text):
    file = tmp_path / "server.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as caught:
        ServerArgs.parse(["--config", str(file)])
    assert caught.value.code == 2
