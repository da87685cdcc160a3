"""The three dialects the bench speaks: bodies it sends and how their answers are read.

Native ``/generate``, OpenAI completions and OpenAI chat. A reader turns decoded answer lines into a
:class:`RequestResult`; arrivals are booked by the result itself, so all dialects share one definition of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sgling.bench.datasets import Prompt
from sgling.bench.result import RequestResult
from sgling.bench.tokenizer import BenchTokenizer


@dataclass(frozen=True)
class RequestOptions:
    """How prompts are sent.

    Attributes:
        temperature, top_p, ignore_eos: sampling; top_p is sent if below 1.
        sampling: further sampling parameters in native spelling (``stop``, ``sampling_seed`` ...).
        extra: merged into the body at the top level; a null value removes a key.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    ignore_eos: bool = True
    stream: bool = True
    model: str = "default"
    sampling: Mapping = field(default_factory=dict)
    extra: Mapping = field(default_factory=dict)


def native_body(prompt: Prompt, options: RequestOptions) -> dict:
    """The body upstream's client sends to ``/generate``."""
    sampling = {
        "temperature": options.temperature,
        "max_new_tokens": prompt.output_len,
        "ignore_eos": options.ignore_eos,
        **options.sampling,
    }
    if options.top_p < 1:
        sampling["top_p"] = options.top_p
    source = {"text": prompt.text} if prompt.text is not None else {"input_ids": prompt.ids}
    body = {
        **source,
        "sampling_params": sampling,
        "stream": options.stream,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    return body | dict(options.extra)


def _openai_body(prompt: Prompt, options: RequestOptions, limit: str) -> dict:
    body = {
        "model": options.model,
        "temperature": options.temperature,
        limit: prompt.output_len,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
        **options.sampling,
    }
    if options.top_p < 1:
        body["top_p"] = options.top_p
    if options.stream:  # token counts per chunk: without them a chunk's tokens would have to be guessed
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body


def _merged(body: dict, extra: Mapping) -> dict:
    return {name: value for name, value in (body | dict(extra)).items() if value is not None}


def completions_body(prompt: Prompt, options: RequestOptions) -> dict:
    """Body of ``/v1/completions``."""
    body = _openai_body(prompt, options, "max_tokens")
    return _merged({**body, "prompt": prompt.text if prompt.text is not None else prompt.ids}, options.extra)


def chat_body(prompt: Prompt, options: RequestOptions) -> dict:
    """Body of ``/v1/chat/completions``; a prompt without messages is one user message."""
    if prompt.messages is None and prompt.text is None:
        raise ValueError("token ids cannot be sent as a chat message; use another --backend or a text data set")
    body = _openai_body(prompt, options, "max_completion_tokens")
    body["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
    body |= {"tools": prompt.tools, "chat_template_kwargs": dict(prompt.template_kwargs) or None}
    return _merged(body, options.extra)


class NativeReader:
    """Reads ``/generate``: every line carries the whole answer so far."""

    def __init__(self, result: RequestResult, tokenizer: BenchTokenizer | None = None):
        self._result = result
        self._first_token = 0.0

    def read(self, chunk: dict, now: float) -> None:
        """One line. Raises ValueError for an error line."""
        result, meta = self._result, chunk["meta_info"]
        result.meta_info = meta
        if not self._first_token and meta["completion_tokens"]:
            self._first_token = now - result.start
        if chunk["text"]:
            result.text = chunk["text"]
            result.tokens_arrived(now, meta["completion_tokens"])
        result.output_ids = chunk.get("output_ids", [])

    def close(self) -> None:
        """End of the answer: one that decoded to no text is timed by its first token."""
        result = self._result
        if not result.text and self._first_token:
            result.ttft, result.output_len = self._first_token, result.meta_info["completion_tokens"]


class OpenAIReader:
    """Reads completions: deltas, with token counts in ``usage`` where the server sends them."""

    def __init__(self, result: RequestResult, tokenizer: BenchTokenizer | None = None):
        self._result = result
        self._tokenizer = tokenizer
        self._counted: int | None = None
        self._estimated = 0

    def read(self, chunk: dict, now: float) -> None:
        """One chunk, or a one-shot answer."""
        result = self._result
        self._read_facts(chunk)
        if not chunk.get("choices"):
            return
        choice = chunk["choices"][0]
        if choice.get("finish_reason"):
            result.meta_info["finish_reason"] = {"type": choice["finish_reason"]}
        if piece := self.take_text(choice):
            self._estimated += self._count(piece)
            usage = chunk.get("usage") or {}
            total = usage.get("completion_tokens", self._estimated)
            result.tokens_arrived(now, max(total, result.output_len))

    def _read_facts(self, chunk: dict) -> None:
        meta = self._result.meta_info
        if usage := chunk.get("usage"):
            self._counted = usage["completion_tokens"]
            meta["prompt_tokens"] = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            meta["cached_tokens"] = details.get("cached_tokens", 0)
        if details := (chunk.get("sglext") or {}).get("spec_tokens_details"):
            meta["spec_verify_ct"] = details["verify_ct"]
            meta["spec_num_correct_drafts"] = details["num_correct_drafts"]

    def _count(self, piece: str) -> int:
        return max(len(self._tokenizer.encode(piece)), 1) if self._tokenizer else 1

    def take_text(self, choice: dict) -> str:
        """New text of a choice, entered into the result."""
        text = choice.get("text") or ""
        self._result.text += text
        return text

    def close(self) -> None:
        """The server's final count stands; without one the text is tokenised and the count marked as an estimate."""
        result = self._result
        result.len_estimated = self._counted is None
        result.output_len = self._estimated if self._counted is None else self._counted


class ChatReader(OpenAIReader):
    """Reads chat completions: content, reasoning and tool calls all are output."""

    def take_text(self, choice: dict) -> str:
        """New content, reasoning and call text of a choice."""
        result = self._result
        delta = choice.get("delta") or choice.get("message") or {}
        content, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        result.text += content
        result.reasoning += reasoning
        return content + reasoning + "".join(self._take_call(call) for call in delta.get("tool_calls") or ())

    def _take_call(self, call: dict) -> str:
        calls, function = self._result.tool_calls, call.get("function") or {}
        while len(calls) <= call.get("index", 0):
            calls.append({"name": "", "arguments": ""})
        entry = calls[call.get("index", 0)]
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        entry["name"] += name
        entry["arguments"] += arguments
        return name + arguments


class Backend(NamedTuple):
    """A dialect: route, body, reader, route that empties the cache, and extra fields only this family understands."""

    path: str
    body: object
    reader: type
    flush_path: str = "/flush_cache"
    extra: Mapping = {}


_SPEC_DETAILS = {"return_spec_tokens_details": True}
_VLLM_FLUSH = "/reset_prefix_cache"
BACKENDS: dict[str, Backend] = {
    "sglang": Backend("/generate", native_body, NativeReader),
    "sglang-native": Backend("/generate", native_body, NativeReader),
    "sglang-oai": Backend("/v1/completions", completions_body, OpenAIReader, extra=_SPEC_DETAILS),
    "sglang-oai-chat": Backend("/v1/chat/completions", chat_body, ChatReader, extra=_SPEC_DETAILS),
    "vllm": Backend("/v1/completions", completions_body, OpenAIReader, _VLLM_FLUSH),
    "vllm-chat": Backend("/v1/chat/completions", chat_body, ChatReader, _VLLM_FLUSH),
}
