"""What is measured: a server behind HTTP or an engine in this process. Both answer a prompt with the same result."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from sgling.bench.backends import BACKENDS, Backend, NativeReader, RequestOptions, native_body
from sgling.bench.datasets import Prompt
from sgling.bench.http_stream import HttpStatusError, fetch, stream_lines
from sgling.bench.result import RequestResult
from sgling.bench.tokenizer import BenchTokenizer

_ENGINE_FIELDS = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "speculative")
_FAILURES = (OSError, EOFError, HttpStatusError, ValueError, KeyError)


class BenchError(RuntimeError):
    """A measurement cannot go on; the message is for the user."""


class Target(Protocol):
    """Something that answers prompts."""

    name: str

    async def request(self, prompt: Prompt, options: RequestOptions) -> RequestResult:
        """Answer one prompt; failures are recorded in the result, never raised."""

    async def info(self) -> dict:
        """``/server_info``, or an empty object where there is none."""

    async def flush(self) -> None:
        """Empty the prefix cache. Raises :class:`BenchError` when that is refused."""


async def read_stream(lines: AsyncIterator[bytes], result: RequestResult, reader: Any, clock=time.perf_counter) -> None:
    """Read an answer's lines into ``result``. Raises ValueError on an error line."""
    async for line in lines:
        now = clock()
        result.line_arrived(now)
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(f"the server answered {chunk['error']}")
        reader.read(chunk, now)
    reader.close()


class HttpTarget:
    """A running server. One connection per request, as upstream's client."""

    def __init__(
        self,
        url: str,
        backend: str = "sglang",
        headers: Mapping[str, str] | None = None,
        tokenizer: BenchTokenizer | None = None,
        flush_timeout_s: float = 60.0,
    ):
        self.name = self.url = url
        self.backend: Backend = BACKENDS[backend]
        self.headers = dict(headers or {})
        self.tokenizer = tokenizer
        self._flush_timeout_s = flush_timeout_s

    async def request(self, prompt: Prompt, options: RequestOptions) -> RequestResult:
        """See :class:`Target`."""
        result = RequestResult(prompt.input_len, prompt.output_len, prompt.label, options.stream)
        body = self.backend.extra | self.backend.body(prompt, options)
        data = json.dumps(body).encode()
        result.start = time.perf_counter()
        try:
            lines = stream_lines(f"{self.url}{self.backend.path}", data, self.headers)
            await read_stream(lines, result, self.backend.reader(result, self.tokenizer))
            result.judge()
        except _FAILURES as error:
            result.error = f"{type(error).__name__}: {error}"
        return result

    async def info(self) -> dict:
        """See :class:`Target`."""
        answer = await fetch("GET", f"{self.url}/server_info", headers=self.headers)
        return answer.json() if answer.status == 200 else {}

    async def flush(self) -> None:
        """See :class:`Target`."""
        await self.post(f"{self.backend.flush_path}?timeout={self._flush_timeout_s:g}")

    async def post(self, path: str) -> None:
        """An order without a body. Raises :class:`BenchError` unless it is obeyed."""
        answer = await fetch("POST", f"{self.url}{path}", headers=self.headers)
        if answer.status != 200:
            raise BenchError(f"{path.split('?')[0]} answered {answer.status}: {answer.body.decode(errors='replace')}")


class EngineTarget:
    """A :class:`sgling.Engine`; timed as its answers are handed over."""

    def __init__(self, engine: Any, name: str = "engine"):
        self.engine = engine
        self.name = name

    async def request(self, prompt: Prompt, options: RequestOptions) -> RequestResult:
        """See :class:`Target`."""
        result = RequestResult(prompt.input_len, prompt.output_len, prompt.label)
        body = native_body(prompt, options)
        reader = NativeReader(result)
        given = {name: body[name] for name in _ENGINE_FIELDS if name in body}
        result.start = time.perf_counter()
        try:
            answers = await self.engine.async_generate(
                body.get("text"), input_ids=body.get("input_ids"), stream=True, **given
            )
            async for chunk in answers:
                now = time.perf_counter()
                result.line_arrived(now)
                reader.read(chunk, now)
            reader.close()
            result.judge()
        except Exception as error:  # the engine's own error types included: one failed request is a result
            result.error = f"{type(error).__name__}: {error}"
        return result

    async def info(self) -> dict:
        """See :class:`Target`."""
        return await asyncio.to_thread(self.engine.get_server_info)

    async def flush(self) -> None:
        """See :class:`Target`."""
        if not await asyncio.to_thread(self.engine.flush_cache, 60.0):
            raise BenchError("the engine refused to flush its cache: requests are running")
