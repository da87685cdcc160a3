"""Turn the text of one choice into what a chat answer is made of: reasoning, content, tool calls.

The same events feed the streamed and the one-shot answer, so both say the same.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from sgling.srt.entrypoints.openai.context import ServingContext
from sgling.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sgling.srt.parser.reasoning_parser import ReasoningParser, ReasoningPiece
from sgling.srt.parser.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from sgling.srt.parser.tool_call_parser import EventKind, ParsedCall, ToolCallParser, ToolEvent


class PartKind(enum.Enum):
    """What a :class:`Part` carries."""

    REASONING = "reasoning"
    CONTENT = "content"
    UNCLOSED = "unclosed"  # thinking never ended: its whole text once more, because it is all there is of an answer
    CALL_NAME = "call name"
    CALL_ARGUMENTS = "call arguments"
    CALL_END = "call end"
    CALL_CUT = "call cut"  # raw text of a call that the end of the output cut off


class Part(NamedTuple):
    """A piece of a choice; ``call`` is the index of the tool call it belongs to."""

    kind: PartKind
    text: str
    call: int = -1


_CALL_PARTS = {
    EventKind.TEXT: PartKind.CONTENT,
    EventKind.NAME: PartKind.CALL_NAME,
    EventKind.ARGUMENTS: PartKind.CALL_ARGUMENTS,
    EventKind.END: PartKind.CALL_END,
    EventKind.CUT: PartKind.CALL_CUT,
}


class OutputRules(NamedTuple):
    """How a request's outputs are read; the same for all its choices."""

    reasoning_parser: str | None  # None: outputs do not start inside reasoning, or are not to be split
    tool_call_parser: str | None  # None: calls stay in the content
    tools: list[dict[str, Any]]
    one_call: bool  # parallel_tool_calls: false
    trim_start: bool

    @classmethod
    def of(
        cls, context: ServingContext, request: ChatCompletionRequest, tools: list[dict[str, Any]], in_reasoning: bool
    ) -> OutputRules:
        """Rules of a request; ``in_reasoning``: its prompt ends inside thinking."""
        return cls(
            reasoning_parser=context.reasoning_parser if in_reasoning and request.separate_reasoning else None,
            tool_call_parser=context.tool_call_parser if tools else None,
            tools=tools,
            one_call=not request.parallel_tool_calls,
            trim_start=not request.continue_final_message,
        )


class ChatOutput:
    """Reads one choice: :meth:`push` per piece of text, :meth:`finish` once."""

    def __init__(self, rules: OutputRules) -> None:
        self._rules = rules
        self._reasoning: ReasoningParser | None = None
        if rules.reasoning_parser is not None:
            self._reasoning = REASONING_PARSERS[rules.reasoning_parser](in_reasoning=True)
        self._tools: ToolCallParser | None = None
        if rules.tool_call_parser is not None:
            self._tools = TOOL_CALL_PARSERS[rules.tool_call_parser](rules.tools, rules.trim_start)
        self._thought: list[str] = []

    @property
    def has_calls(self) -> bool:
        """Whether a complete tool call was read."""
        return self._tools is not None and self._tools.complete_calls > 0

    def push(self, text: str) -> list[Part]:
        """Add text; return what is decided."""
        piece = ReasoningPiece("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._parts(piece)

    def finish(self, aborted: bool) -> list[Part]:
        """End of output: what was held back, and the repetition of thinking that never ended."""
        piece = ReasoningPiece() if self._reasoning is None else self._reasoning.finish()
        parts = self._parts(piece)
        if self._tools is not None:
            parts += self._call_parts(self._tools.finish())
        if self._reasoning is not None and self._reasoning.in_reasoning and self._thought and not aborted:
            parts.append(Part(PartKind.UNCLOSED, "".join(self._thought)))
        return parts

    def _parts(self, piece: ReasoningPiece) -> list[Part]:
        parts = []
        if piece.reasoning:
            self._thought.append(piece.reasoning)
            parts.append(Part(PartKind.REASONING, piece.reasoning))
        if self._tools is not None:
            parts += self._call_parts(self._tools.push(piece.content))
        elif piece.content:
            parts.append(Part(PartKind.CONTENT, piece.content))
        return parts

    def _call_parts(self, events: list[ToolEvent]) -> list[Part]:
        if self._rules.one_call:
            events = [event for event in events if event.index < 1]
        return [Part(_CALL_PARTS[kind], text, index) for kind, text, index in events]


class ParsedChoice(NamedTuple):
    """One-shot form of a choice."""

    reasoning: str | None
    content: str
    calls: list[ParsedCall]


def parse_choice(output: ChatOutput, text: str, aborted: bool) -> ParsedChoice:
    """Read a whole output. Thinking that never ended becomes the content; a call that was cut off stays in it."""
    parts = output.push(text) + output.finish(aborted)
    unclosed = [part.text for part in parts if part.kind is PartKind.UNCLOSED]
    reasoning = "".join(part.text for part in parts if part.kind is PartKind.REASONING)
    if unclosed:
        return ParsedChoice(None, unclosed[0], [])
    content = "".join(part.text for part in parts if part.kind in (PartKind.CONTENT, PartKind.CALL_CUT))
    calls = []
    for done in (part.call for part in parts if part.kind is PartKind.CALL_END):
        name, arguments = (
            "".join(part.text for part in parts if part.call == done and part.kind is kind)
            for kind in (PartKind.CALL_NAME, PartKind.CALL_ARGUMENTS)
        )
        calls.append(ParsedCall(done, name, arguments))
    return ParsedChoice(reasoning or None, content, calls)


def finish_fields(reason: dict[str, Any] | None, has_calls: bool) -> dict[str, Any]:
    """``finish_reason`` and ``matched_stop``: ``tool_calls`` only when a complete call ended in a natural stop."""
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    if reason["type"] == "stop" and has_calls:
        return {"finish_reason": "tool_calls", "matched_stop": None}
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}
