"""The client against a scripted server: token times, errors, rates, the whole command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from sgling.bench import serving
from sgling.bench.client import GenerateOptions, RequestResult, native_body, read_stream, run_request
from sgling.bench.datasets import Prompt
from sgling.bench.http_stream import HttpStatusError, fetch, stream_lines
from sgling.srt.config.bench_args import BenchServingArgs


def chunk(text: str, tokens: int, finished: bool = False, **meta) -> bytes:
    reason = {"type": "length", "length": tokens} if finished else None
    meta = {"completion_tokens": tokens, "prompt_tokens": 3, "finish_reason": reason, **meta}
    return b"data: " + json.dumps({"text": text, "output_ids": [], "meta_info": meta}).encode()


async def replay(*lines: bytes):
    for line in lines:
        yield line


def read(times: list[float], *lines: bytes) -> RequestResult:
    """Read lines that arrive at the given times."""
    result = RequestResult(3, 8, start=10.0)
    asyncio.run(read_stream(replay(*lines), result, iter(times).__next__))
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
    assert native_body(prompt, GenerateOptions("u", extra={"rid": "x"})) == {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        "rid": "x",
    }
    body = native_body(prompt._replace(text="hi"), GenerateOptions("u", top_p=0.5))
    assert body["text"] == "hi"
    assert body["sampling_params"]["top_p"] == 0.5
    assert "input_ids" not in body


class ScriptedServer:
    """Answers by path: a status and pieces of a body; counts what it was asked."""

    def __init__(self, answers: dict[str, tuple[int, list[bytes]]]):
        self.answers = answers
        self.asked: list[tuple[str, dict | None]] = []
        self.running = self.peak = 0
        self.authorization: set[str] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get("Content-Length", 0)))
        path = head.split()[1].split("?")[0]
        self.asked.append((path, json.loads(body) if body else None))
        self.authorization.add(fields.get("Authorization", ""))
        self.running += 1
        self.peak = max(self.peak, self.running)
        status, pieces = self.answers.get(path, (404, [b"{}"]))
        writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.running -= 1
        writer.close()


def with_server(answers: dict, use: Callable):
    """Run ``await use(url, server)`` against a scripted server."""

    async def body():
        scripted = ScriptedServer(answers)
        async with await asyncio.start_server(scripted.handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await use(f"http://127.0.0.1:{port}", scripted)

    return asyncio.run(body())


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
        return await run_request(Prompt([1], None, 2), GenerateOptions(url))

    result = with_server({"/generate": answer}, use)
    assert not result.success
    assert error in result.error


def test_refused_connection_is_a_failure():
    async def use(url, _server):
        return url

    dead = with_server({}, use)
    result = asyncio.run(run_request(Prompt([1], None, 2), GenerateOptions(dead)))
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
        args = BenchServingArgs.from_cli(["--base-url", url, "--max-concurrency", "3"])
        results = await serving.run_load(args, [Prompt([1], None, 2)] * 12, GenerateOptions(url))
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
    assert [path for path, _ in server.asked] == order
    assert server.authorization == {"Bearer key"}
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert (record["completed"], record["total_input_tokens"], record["total_output_tokens"]) == (3, 9, 6)
    assert (record["accept_length"], record["server_info"]) == (1.0, {"version": "1"})
    assert "Accept length:" in capsys.readouterr().out


def test_no_server(capsys):
    argv = ["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]
    assert serving.main(argv) == 1
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--num-prompts 0", "--random-range-ratio 2", "--backend vllm", "--sead 1"])
def test_usage_errors(flags):
    with pytest.raises(SystemExit) as caught:
        BenchServingArgs.from_cli(flags.split())
    assert caught.value.code == 2
