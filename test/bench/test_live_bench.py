"""The bench command against the real HTTP layer, in every dialect it speaks, and the fallback counters of an engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from bench.faulty_engine import faulty_engine
from model.tiny_model import write_tiny_checkpoint
from server.fake_scheduler import RUN_LEN
from server.live_server import LiveServer
from server.serving_helpers import small_tokenizer
from sgling.bench import serving
from sgling.bench.contract.measure import decode_steps
from sgling.bench.datasets import Prompt
from sgling.bench.gate import correctness_command
from sgling.bench.gate.correctness import GREEDY, ask
from sgling.bench.gate.subject import open_subject
from sgling.srt.config.gate_args import Subject
from sgling.srt.config.model_path import ASSETS_DIR

OUTPUT = 7


@pytest.fixture(scope="module")
def live():
    server = LiveServer(chat_template=str(ASSETS_DIR / "ling3-pico" / "chat_template.jinja")).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_every_dialect_gives_the_same_counts(live, tokenizer_dir, tmp_path, monkeypatch, backend, stream):
    monkeypatch.setattr(serving, "_PAUSE_S", 0.0)
    out = tmp_path / "out.jsonl"
    flags = f"--backend {backend} --base-url {live.base_url} --tokenizer {tokenizer_dir} --num-prompts 3 --disable-tqdm"
    flags += f" --random-input-len 12 --random-output-len {OUTPUT} --random-range-ratio 1 --output-file {out}"
    if backend.startswith("vllm"):
        flags += " --max-concurrency 2"
    else:
        flags += " --request-rate 500 --flush-cache"
    assert serving.main([*flags.split(), *([] if stream else ["--disable-stream"])]) == 0
    record = json.loads(out.read_text())
    assert (record["completed"], record["total_output_tokens"]) == (3, 3 * OUTPUT)
    steps = -(-OUTPUT // RUN_LEN)
    if backend in ("sglang", "sglang-oai", "sglang-oai-chat"):  # the fake books one accepted draft in all
        assert record["accept_length"] == pytest.approx((steps + 1) / steps)
        assert record["sgling"]["accept_source"] == "requests"
    else:
        assert record["sgling"]["accept_source"] == "server average"
    assert (record["mean_ttft_ms"] is not None) == (record["mean_tpot_ms"] is not None) == stream


def test_a_gate_opens_a_running_server(live, tokenizer_dir, capsys):
    args = Subject(base_url=live.base_url, tokenizer=str(tokenizer_dir))

    async def look():
        async with open_subject(args) as subject:
            (result,) = await ask(subject.target, [Prompt([7, 8, 9], None, 6)], GREEDY, at_once=False)
            return subject, result

    subject, result = asyncio.run(look())
    assert (subject.model, subject.template) == ("ling3-pico", None)
    assert result.output_ids == [7, 8, 9, 7, 8, 9]
    assert correctness_command.main(["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]) == 1
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


def test_clients_need_no_torch():
    """Commands that measure a remote server start at once, and on machines without the engine's libraries."""
    modules = "serving ab_command contract.command gate.correctness_command evals.gsm8k evals.tools".split()
    script = "import sys\n" + "".join(f"import sgling.bench.{name}\n" for name in modules)
    script += "print([name for name in ('torch', 'transformers', 'fastapi', 'zmq') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_steps_that_fall_back_to_width_one_are_counted(tmp_path):
    with faulty_engine(write_tiny_checkpoint(tmp_path)) as engine:
        engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 6, "ignore_eos": True})
        total, fallback = decode_steps(engine.get_server_info())
        assert total >= 2
        assert fallback == 0
        params = {"max_new_tokens": 6, "ignore_eos": True}
        engine.generate(input_ids=[5, 6, 7], sampling_params=params, speculative={"enabled": False})
        after, narrow = decode_steps(engine.get_server_info())
        assert narrow == after - total >= 5
