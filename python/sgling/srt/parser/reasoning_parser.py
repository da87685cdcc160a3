"""Split model output into reasoning and answer, in one shot or while it streams.

One state machine serves both: its result is a function of the text alone, never of how the text was cut into pieces.
Grammar (Ling-3.0): the prompt ends in an open ``<think>``, so the output starts inside reasoning; the first
``</think>`` ends it. A ``<tool_call>`` before any ``</think>`` ends it too and belongs to the answer. A leading
``<think>`` is dropped. Newlines around the reasoning and at the start of the answer behind it are formatting and are
dropped, as the template drops them when it renders history. Everything behind the end of reasoning is answer, further
think tags included.
"""

from __future__ import annotations

from typing import NamedTuple

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
TOOL_OPEN = "<tool_call>"


class ReasoningPiece(NamedTuple):
    """Newly decided text; either part may be empty."""

    reasoning: str = ""
    content: str = ""


def held_suffix(text: str, tags: tuple[str, ...]) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of one of ``tags``: text that must wait."""
    longest = max(len(tag) for tag in tags) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(tag.startswith(tail) for tag in tags if len(tag) > size):
            return size
    return 0


class ReasoningParser:
    """Streaming splitter for one choice: :meth:`push` per piece of text, :meth:`finish` once at the end."""

    def __init__(self, in_reasoning: bool = True) -> None:
        self.in_reasoning = in_reasoning
        self._trim_content = in_reasoning  # an answer that follows no reasoning is passed on untouched
        self._pending = ""
        self._may_open = True  # a leading tag may still come
        self._at_start = True  # nothing of the reasoning was emitted yet: newlines are dropped

    def push(self, text: str) -> ReasoningPiece:
        """Add text; return what is decided. A suffix that may be part of a tag or of dropped newlines is held back."""
        if not self.in_reasoning:
            return ReasoningPiece("", self._content(text))
        self._pending += text
        if not self._skip_start():
            return ReasoningPiece()
        found = [(at, tag) for tag in (THINK_CLOSE, TOOL_OPEN) if (at := self._pending.find(tag)) >= 0]
        if found:
            return self._leave(*min(found))
        keep = held_suffix(self._pending, (THINK_CLOSE, TOOL_OPEN))
        emit = self._pending[: len(self._pending) - keep].rstrip("\n")
        self._pending = self._pending[len(emit) :]
        return ReasoningPiece(emit, "")

    def finish(self) -> ReasoningPiece:
        """End of output: what was held back is plain text after all."""
        rest, self._pending = self._pending, ""
        return ReasoningPiece(rest.rstrip("\n"), "")

    def _skip_start(self) -> bool:
        """Drop leading newlines and one opening tag; False while nothing else was seen."""
        if not self._at_start:
            return True
        self._pending = self._pending.lstrip("\n")
        if self._may_open and self._pending:
            if THINK_OPEN.startswith(self._pending) and self._pending != THINK_OPEN:
                return False
            self._pending = self._pending.removeprefix(THINK_OPEN).lstrip("\n")
            self._may_open = False
        self._at_start = not self._pending
        return not self._at_start

    def _leave(self, at: int, tag: str) -> ReasoningPiece:
        """Reasoning ends at ``tag``, found at offset ``at``."""
        reasoning = self._pending[:at].rstrip("\n")
        rest = self._pending[at + len(tag) :] if tag == THINK_CLOSE else self._pending[at:]
        self.in_reasoning, self._pending = False, ""
        return ReasoningPiece(reasoning, self._content(rest))

    def _content(self, text: str) -> str:
        if self._trim_content:
            text = text.lstrip("\n")
            self._trim_content = not text
        return text


def split_reasoning(text: str, in_reasoning: bool = True) -> ReasoningPiece:
    """One-shot form: reasoning and answer of a finished output."""
    parser = ReasoningParser(in_reasoning)
    head, tail = parser.push(text), parser.finish()
    return ReasoningPiece(head.reasoning + tail.reasoning, head.content + tail.content)


def prompt_opens_reasoning(prompt: str) -> bool:
    """Whether generation starts inside reasoning: the prompt's last think tag is an open one.

    The template decides this (``enable_thinking`` and its default), so its rendered text is what is asked.
    """
    return prompt.rfind(THINK_OPEN) > prompt.rfind(THINK_CLOSE)
