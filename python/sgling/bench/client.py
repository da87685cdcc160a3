"""Sends one prompt to the native ``/generate`` route and measures its answer."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from sgling.bench.datasets import Prompt
from sgling.bench.http_stream import HttpStatusError, stream_lines

_CONNECTION_ERRORS = (OSError, EOFError, HttpStatusError, ValueError)


@dataclass
class RequestResult:
    """What one request did. Times are seconds of ``perf_counter``; lengths are tokens.

    Attributes:
        input_len: asked prompt length; the server's count is ``meta_info["prompt_tokens"]``.
        start: immediately before the request was sent.
        ttft: start to the first line with text (an answer that decodes to no text at all: with a token).
        latency: start to the last line, ``[DONE]`` included.
        itl: one gap per token after the first line; a line's gap is split evenly over its tokens.
        output_len: ``completion_tokens`` of the last line with text.
        meta_info: of the last line.
    """

    input_len: int
    requested_output_len: int
    success: bool = False
    error: str = ""
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_len: int = 0
    text: str = ""
    meta_info: dict = field(default_factory=dict)


@dataclass(frozen=True)
class GenerateOptions:
    """How prompts are sent.

    Attributes:
        url: base URL.
        temperature, top_p, ignore_eos: sampling; top_p is sent if below 1.
        extra: merged into the body at the top level.
        headers: added to every request.
    """

    url: str
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = True
    extra: Mapping = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def native_body(prompt: Prompt, options: GenerateOptions) -> dict:
    """The body upstream's client sends to ``/generate``."""
    sampling = {
        "temperature": options.temperature,
        "max_new_tokens": prompt.output_len,
        "ignore_eos": options.ignore_eos,
    }
    if options.top_p < 1:
        sampling["top_p"] = options.top_p
    source = {"text": prompt.text} if prompt.text is not None else {"input_ids": prompt.ids}
    return {
        **source,
        "sampling_params": sampling,
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        **options.extra,
    }


async def run_request(prompt: Prompt, options: GenerateOptions) -> RequestResult:
    """Send one prompt; failures are recorded in the result, never raised."""
    result = RequestResult(prompt.input_len, prompt.output_len)
    body = json.dumps(native_body(prompt, options)).encode()
    result.start = time.perf_counter()
    try:
        await read_stream(stream_lines(f"{options.url}/generate", body, options.headers), result)
        _judge(result)
    except _CONNECTION_ERRORS as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


async def read_stream(lines: AsyncIterator[bytes], result: RequestResult, clock=time.perf_counter) -> None:
    """Read an answer's lines into ``result`` (upstream's definitions). Raises ValueError on an error line."""
    previous, tokens, first_token = 0.0, 0, 0.0
    async for line in lines:
        now = clock()
        result.latency = now - result.start
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(f"the server answered {chunk['error']}")
        result.meta_info = chunk["meta_info"]
        first_token = first_token or (result.latency if chunk["meta_info"]["completion_tokens"] else 0.0)
        if not chunk["text"]:
            continue
        result.text, result.output_len = chunk["text"], chunk["meta_info"]["completion_tokens"]
        if not result.ttft:
            result.ttft = now - result.start
        elif new := result.output_len - tokens:
            result.itl += [(now - previous) / new] * new
        else:
            continue
        previous, tokens = now, result.output_len
    if not result.text and first_token:
        result.ttft, result.output_len = first_token, result.meta_info["completion_tokens"]


def _judge(result: RequestResult) -> None:
    """A request succeeded if it ran to its end and produced a token."""
    reason = result.meta_info.get("finish_reason")
    if not reason:
        result.error = "the stream ended before the request did"
    elif reason["type"] == "abort":
        result.error = f"aborted: {reason.get('message')}"
    elif not result.output_len:
        result.error = "the answer has no token"
    else:
        result.success = True
