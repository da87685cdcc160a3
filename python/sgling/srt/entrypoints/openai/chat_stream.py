"""Streamed form of one chat choice: native answers in, ``choices[0]`` objects of chunks out."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from sgling.srt.entrypoints.openai.chat_output import ChatOutput, Part, PartKind, finish_fields
from sgling.srt.entrypoints.openai.logprobs import LogprobCursor, chat_logprobs
from sgling.srt.entrypoints.openai.protocol import ChatCompletionRequest


def new_call_id() -> str:
    """Id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChoiceStream:
    """Keeps what was sent of one choice.

    Order of its chunks: the role (with the first output), reasoning, content and tool deltas as they come, one finish.
    Logprobs and token ids of text that is held back go out with the next chunk.
    """

    def __init__(
        self, index: int, output: ChatOutput, request: ChatCompletionRequest, token_bytes: Callable[[int], bytes]
    ) -> None:
        self.index = index
        self._output = output
        self._request = request
        self._token_bytes = token_bytes
        self._started = False
        self._sent_text = 0
        self._sent_ids = 0
        self._ids: list[int] = []
        self._cursor = LogprobCursor()
        self._tokens: list[Any] = []
        self._tops: list[Any] = []
        self._kept_reasoning: list[str] = []  # stream_reasoning: false

    def choices(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Choice objects that a native answer adds, one per chunk."""
        reason = answer["meta_info"]["finish_reason"]
        found = []
        if not self._started:
            self._started = True
            found.append(self._choice({"role": "assistant", "content": "", "reasoning_content": None}, False))
        self._note(answer)
        delta = answer["text"][self._sent_text :]
        self._sent_text = max(self._sent_text, len(answer["text"]))
        parts = self._output.push(delta)
        if reason is not None:
            parts += self._output.finish(reason["type"] == "abort")
        found += [self._choice(delta) for delta in self._deltas(parts, reason is not None)]
        if reason is not None:
            last = self._choice({"reasoning_content": None})
            found.append({**last, **finish_fields(reason, self._output.has_calls)})
        return found

    def _note(self, answer: dict[str, Any]) -> None:
        """Take over the new tokens' ids and logprobs."""
        if self._request.return_token_ids:
            self._ids += answer["output_ids"][self._sent_ids :]
            self._sent_ids = len(answer["output_ids"])
        if self._request.logprobs:
            tokens, tops = self._cursor.take(answer["meta_info"])
            self._tokens += tokens
            self._tops += tops

    def _deltas(self, parts: list[Part], finished: bool) -> list[dict[str, Any]]:
        if not self._request.stream_reasoning:
            parts = self._keep_reasoning(parts, finished)
        deltas = [self._delta(part) for part in parts]
        return [delta for delta in deltas if delta is not None]

    def _keep_reasoning(self, parts: list[Part], finished: bool) -> list[Part]:
        """Hold reasoning back until it is over, then give it out in one piece."""
        self._kept_reasoning += [part.text for part in parts if part.kind is PartKind.REASONING]
        rest = [part for part in parts if part.kind is not PartKind.REASONING]
        if self._kept_reasoning and (rest or finished):
            rest.insert(0, Part(PartKind.REASONING, "".join(self._kept_reasoning)))
            self._kept_reasoning = []
        return rest

    def _delta(self, part: Part) -> dict[str, Any] | None:
        """Delta of a part; None for parts that only the one-shot form needs."""
        match part.kind:
            case PartKind.REASONING:
                return {"reasoning_content": part.text}
            case PartKind.CONTENT | PartKind.UNCLOSED:
                return {"content": part.text, "reasoning_content": None}
            case PartKind.CALL_NAME:
                return _call_delta(part.call, new_call_id(), part.text, "")
            case PartKind.CALL_ARGUMENTS:
                return _call_delta(part.call, None, None, part.text)
        return None

    def _choice(self, delta: dict[str, Any], with_tokens: bool = True) -> dict[str, Any]:
        """Choice object around a delta; it takes along the ids and logprobs that wait."""
        found: dict[str, Any] = {"index": self.index, "delta": delta, "logprobs": None}
        found |= finish_fields(None, False)
        if with_tokens and self._tokens:
            found["logprobs"] = chat_logprobs(self._tokens, self._tops, self._token_bytes)
            self._tokens, self._tops = [], []
        if with_tokens and self._request.return_token_ids:
            found["token_ids"], self._ids = self._ids, []
        return found


def _call_delta(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"index": index, "id": call_id, "type": "function", "function": function}
    return {"tool_calls": [call], "reasoning_content": None}
