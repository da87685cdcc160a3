"""The client against a scripted server: token times, errors, rates, the whole command."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.scripted_server import chunk, paced_answer, with_server
from sgling.bench import serving
from sgling.bench.backends import (
    BACKENDS,
    ChatReader,
    NativeReader,
    OpenAIReader,
    RequestOptions,
    chat_body,
    completions_body,
    native_body,
)
from sgling.bench.connect import wait_until_ready
from sgling.bench.datasets import Prompt
from sgling.bench.http_stream import HttpStatusError, fetch, stream_lines
from sgling.bench.load import Load, fill_cache, run_load
from sgling.bench.metrics import compute_metrics
from sgling.bench.progress import Progress
from sgling.bench.result import RequestResult
from sgling.bench.target import BenchError, HttpTarget, read_stream
from sgling.srt.config import bench_args
from sgling.srt.config.bench_args import BenchServingArgs

PROMPT, OPTIONS = Prompt([1], None, 2), RequestOptions()


async def replay(*lines: bytes):
    for line in lines:
        yield line


def read(times: list[float], *lines: bytes, reader=NativeReader, tokenizer=None) -> RequestResult:
    """Read lines that arrive at the given times."""
    result = RequestResult(3, 8, start=10.0)
    asyncio.run(read_stream(replay(*lines), result, reader(result, tokenizer), iter(times).__next__))
    return result


def test_gaps_are_split_over_the_tokens_of_a_chunk():
    times = [10.5, 10.8, 11.0, 11.2]
    result = read(times, chunk("a", 1), chunk("abcd", 4), chunk("abcdef", 6, True), b"data: [DONE]")
    assert result.ttft == pytest.approx(0.5)
    assert result.itl == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])
    assert (result.output_len, result.text) == (6, "abcdef")
    assert result.latency == pytest.approx(1.2)  # [DONE] included
    # mean ITL * (tokens - 1) = last - first token time
    assert sum(result.itl) == pytest.approx(11.0 - 10.5)


def test_chunks_without_text_or_without_new_tokens_add_nothing():
    times = [10.1, 10.2, 10.3, 10.6, 10.6]
    result = read(times, chunk("", 0), chunk("a", 1), chunk("a", 1), chunk("abc", 3, True), b"data: [DONE]")
    assert result.ttft == pytest.approx(0.2)
    assert result.itl == pytest.approx([0.2, 0.2])


def test_an_answer_without_text_still_has_tokens():
    result = read([10.1, 10.4, 10.4], chunk("", 1), chunk("", 2, True), b"data: [DONE]")
    assert result.ttft == pytest.approx(0.1)
    assert (result.output_len, result.itl) == (2, [])


def test_error_line():
    with pytest.raises(ValueError, match="too long"):
        read([10.1], b'data: {"error": {"message": "too long"}}')


def test_body_is_what_upstream_sends():
    prompt = Prompt([1, 2], None, 5)
    assert native_body(prompt, RequestOptions(extra={"rid": "x"})) == {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        "rid": "x",
    }
    body = native_body(prompt._replace(text="hi"), RequestOptions(top_p=0.5))
    assert body["text"] == "hi"
    assert body["sampling_params"]["top_p"] == 0.5
    assert "input_ids" not in body


ANSWER = [chunk("a", 1) + b"\n\n", chunk("ab", 2, True, spec_verify_ct=1, spec_num_correct_drafts=0) + b"\n\ndata: "]
ANSWER += [b"[DONE]\n\n"]  # a line may arrive in two pieces


def test_lines_are_put_together_across_pieces():
    async def use(url, _server):
        return [line async for line in stream_lines(f"{url}/generate", b"{}", {})]

    lines = with_server({"/generate": (200, ANSWER)}, use)
    assert len(lines) == 3
    assert lines[-1] == b"data: [DONE]"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((503, [b"queue full"]), "HTTP 503: queue full"),
        ((200, [chunk("a", 1) + b"\n\n"]), "ended before the request did"),
        ((200, [b'data: {"error": "no"}\n\n']), "no"),
        ((200, [b"data: {broken\n\n"]), "JSONDecodeError"),
        ((200, [chunk("", 0, True) + b"\n\n"]), "no token"),
        ((200, [chunk("a", 1, True).replace(b'"length"', b'"abort"', 1) + b"\n\n"]), "aborted"),
    ],
)
def test_failures_are_recorded(answer, error):
    async def use(url, _server):
        return await HttpTarget(url).request(PROMPT, OPTIONS)

    result = with_server({"/generate": answer}, use)
    assert not result.success
    assert error in result.error


def test_refused_connection_is_a_failure():
    async def use(url, _server):
        return url

    dead = with_server({}, use)
    result = asyncio.run(HttpTarget(dead).request(PROMPT, OPTIONS))
    assert not result.success
    assert "ConnectionRefusedError" in result.error


def test_status_errors_of_plain_calls():
    async def use(url, _server):
        return await fetch("GET", f"{url}/nothing")

    answer = with_server({}, use)
    with pytest.raises(HttpStatusError, match="HTTP 404"):
        answer.json()


def test_no_more_than_the_asked_concurrency():
    async def use(url, server):
        results = await run_load(HttpTarget(url), [PROMPT] * 12, OPTIONS, Load(3))
        return server.peak, results

    peak, results = with_server({"/generate": (200, ANSWER)}, use)
    assert peak == 3
    assert all(result.success for result in results)


def test_the_whole_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serving, "_PAUSE_S", 0.0)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    answers = {
        "/v1/models": (200, [b'{"data": [{"id": "m"}]}']),
        "/model_info": (200, [json.dumps({"tokenizer_path": str(tmp_path)}).encode()]),
        "/flush_cache": (200, [b"Cache flushed."]),
        "/generate": (200, ANSWER),
        "/server_info": (200, [b'{"version": "1"}']),
    }
    flags = "--dataset-name random-ids --tokenize-prompt --num-prompts 3 --random-input-len 3 --random-output-len 2"
    flags += f" --random-range-ratio 1.0 --flush-cache --max-concurrency 1 --output-file {tmp_path}/out.jsonl"

    async def use(url, server):
        status = await asyncio.to_thread(serving.main, [*flags.split(), "--base-url", url])
        return status, server

    status, server = with_server(answers, use)
    assert status == 0
    order = ["/v1/models", "/model_info", "/generate", "/flush_cache", *["/generate"] * 3, "/server_info"]
    # before the flush and the run, our client also reads which device it measures and the counters it starts from
    order[2:2], order[5:5] = ["/server_info"], ["/server_info"]
    assert [path for path, _ in server.asked] == order
    assert server.authorization == {"Bearer key"}
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert (record["completed"], record["total_input_tokens"], record["total_output_tokens"]) == (3, 9, 6)
    assert (record["accept_length"], record["server_info"]) == (1.0, {"version": "1"})
    assert "Accept length:" in capsys.readouterr().out


def test_orders_that_are_refused_end_the_run():
    async def use(url, server):
        target = HttpTarget(url)
        await target.post("/start_profile")
        await target.flush()

    with pytest.raises(BenchError, match="/flush_cache answered 400: busy"):
        with_server({"/start_profile": (200, [b""]), "/flush_cache": (400, [b"busy"])}, use)


def test_no_server(capsys):
    argv = ["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]
    assert serving.main(argv) == 1
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


def test_waiting_for_a_server_is_said(capsys):
    assert serving.main(["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0.6"]) == 1
    assert capsys.readouterr().err.count("no answer from http://127.0.0.1:9 yet; waiting 1 s at most") == 1


def test_a_wrong_key_is_not_waited_for(capsys):
    async def use(url, server):
        await wait_until_ready(url, {}, 60)

    with pytest.raises(BenchError, match="refuses this client .OPENAI_API_KEY is its key.: HTTP 401"):
        with_server({"/v1/models": (401, [b"{}"])}, use)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        "--num-prompts 0",
        "--random-range-ratio 2",
        "--backend trt",
        "--sead 1",
        "--dataset-name sharegpt",
        "--header nothing",
        "--backend sglang-oai-chat --tokenize-prompt",
    ],
)
def test_usage_errors(flags):
    with pytest.raises(SystemExit) as caught:
        BenchServingArgs.from_cli(flags.split())
    assert caught.value.code == 2


def oai(choice: dict | None, tokens: int | None = None, **extra) -> bytes:
    usage = None if tokens is None else {"prompt_tokens": 3, "completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": [choice] if choice else [], "usage": usage, **extra}).encode()


def test_completions_count_tokens_by_usage():
    lines = [
        oai({"text": "a", "finish_reason": None}, 1),
        oai({"text": "bcd", "finish_reason": None}, 4),
        oai({"text": "", "finish_reason": "length"}, 4),
        oai(None, sglext={"spec_tokens_details": {"verify_ct": 1, "num_correct_drafts": 2}}),
        oai(None, 4),
        b"data: [DONE]",
    ]
    result = read([10.5, 10.8, 10.9, 10.9, 10.9, 11.0], *lines, reader=OpenAIReader)
    result.judge()
    assert (result.success, result.text, result.output_len, result.len_estimated) == (True, "abcd", 4, False)
    assert result.ttft == pytest.approx(0.5)
    assert result.itl == pytest.approx([0.1, 0.1, 0.1])
    assert compute_metrics([result], 1.0).speculation.accept_length == 3


class Letters:
    """One token per character."""

    vocab_size = 26

    def encode(self, text):
        return [ord(letter) for letter in text]


def test_without_usage_the_length_is_an_estimate_and_says_so():
    lines = [oai({"text": "a", "finish_reason": None}), oai({"text": "bcd", "finish_reason": "stop"}), b"data: [DONE]"]
    result = read([10.5, 10.8, 10.8], *lines, reader=OpenAIReader, tokenizer=Letters())
    assert (result.output_len, result.len_estimated) == (4, True)  # not the eight that were asked for
    assert result.itl == pytest.approx([0.1, 0.1, 0.1])


def delta(**fields) -> dict:
    return {"delta": fields, "finish_reason": None}


def test_chat_counts_reasoning_content_and_calls_as_output():
    call = {"index": 0, "function": {"name": "add", "arguments": ""}}
    rest = {"index": 0, "function": {"name": None, "arguments": '{"a": 1}'}}
    lines = [
        oai(delta(role="assistant", content="", reasoning_content=None), 1),
        oai(delta(reasoning_content="hm"), 2),
        oai(delta(content="ok", reasoning_content=None), 3),
        oai(delta(tool_calls=[call]), 5),
        oai(delta(tool_calls=[rest]), 6),
        oai({"delta": {}, "finish_reason": "tool_calls"}, 6),
    ]
    result = read([10.1, 10.2, 10.3, 10.5, 10.6, 10.6], *lines, reader=ChatReader)
    assert result.ttft == pytest.approx(0.2)  # a role is no token
    assert (result.reasoning, result.text, result.output_len) == ("hm", "ok", 6)
    assert result.tool_calls == [{"name": "add", "arguments": '{"a": 1}'}]
    assert sum(result.itl) == pytest.approx(0.4)


def test_openai_bodies():
    prompt = Prompt([1], "hi", 5, tools=[{"type": "function"}], template_kwargs={"enable_thinking": False})
    body = completions_body(prompt, RequestOptions(extra={"stream_options": None}))
    assert body == {
        "model": "default", "prompt": "hi", "max_tokens": 5, "temperature": 0.0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    body = chat_body(prompt, RequestOptions(ignore_eos=False))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["max_completion_tokens"], body["tools"]) == (5, prompt.tools)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(ValueError, match="token ids"):
        chat_body(Prompt([1], None, 5), OPTIONS)


def test_backends_are_those_of_the_flag():
    assert tuple(BACKENDS) == bench_args.BACKENDS


def test_one_shot_answers_have_no_token_times():
    lines = [chunk("abc", 3, True).removeprefix(b"data: ")]
    result = read([10.5], *lines)
    result.streamed = False
    result.judge()
    metrics = compute_metrics([result], 1.0)
    assert metrics.e2e_latency.mean == pytest.approx(500)
    assert metrics.ttft.mean is metrics.tpot.mean is None


def test_warm_runs_fill_the_cache_with_every_prompt():
    async def use(url, server):
        await fill_cache(HttpTarget(url), [PROMPT] * 3, OPTIONS, Load(1))
        return [body["sampling_params"]["max_new_tokens"] for _, body in server.asked]

    assert with_server({"/generate": (200, ANSWER)}, use) == [1, 1, 1]

    async def fails(url, _server):
        await fill_cache(HttpTarget(url), [PROMPT], OPTIONS, Load(1))

    with pytest.raises(BenchError, match="HTTP 500"):
        with_server({"/generate": (500, [b"broken"])}, fails)


def test_figures_of_a_paced_server_are_those_it_kept():
    """Fixed pacing: TPOT, ITL and TTFT within 1 % of the moments the server sent at, accept length exact."""
    runs = [3, 1, 4, 2, 3, 1, 4, 2]

    async def use(url, server):
        results = await run_load(HttpTarget(url), [PROMPT] * 3, OPTIONS, Load(1))
        return results, server.sent

    pieces = paced_answer(runs, pause=0.03, first_pause=0.2)
    results, sent = with_server({"/generate": (200, pieces)}, use)
    metrics = compute_metrics(results, 1.0)
    kept = sum(times[-1] - times[0] for times in sent) / len(sent) / sum(runs) * 1000
    assert metrics.tpot.mean == pytest.approx(kept, rel=0.01)
    assert metrics.itl.mean == pytest.approx(kept, rel=0.01)
    first = sum(times[0] - result.start for times, result in zip(sent, results, strict=True)) / 3 * 1000
    assert metrics.ttft.mean == pytest.approx(first, rel=0.01)
    assert metrics.speculation.accept_length == sum(runs) / len(runs)


def test_progress_line():
    now = iter([0.0, 11.0, 11.5]).__next__

    class Terminal:
        text = ""

        def isatty(self):
            return False

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    terminal = Terminal()
    progress = Progress(2, stream=terminal, clock=now)
    progress.add(RequestResult(1, 1, success=True, output_len=11))
    assert terminal.text == "[###############---------------] 1/2 requests, 1.0 tok/s\n"
    progress.add(RequestResult(1, 1, error="x"))  # too soon for another line
    assert terminal.text.count("\n") == 1
    assert "1 failed" in progress.line(12.0)


def test_a_cpu_server_gets_a_small_run():
    args = BenchServingArgs.from_cli(["--num-prompts", "3"])
    small, full = (serving.with_scale(args, info) for info in ({"device": "cpu"}, {"device": "cuda"}))
    assert (small.num_prompts, small.random_input_len) == (3, bench_args.CPU_SCALE[1])
    assert (full.num_prompts, full.random_input_len, full.random_output_len) == (3, 1024, 1024)
