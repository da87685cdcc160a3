"""Find tool calls in model output, in one shot or while it streams.

One state machine serves both: events are a function of the text alone, never of how the text was cut into pieces.
Grammar (Ling-3.0, a relaxed GLM form; ``gap`` is whitespace or the two characters backslash-n):

    call := <tool_call> NAME gap* pair* </tool_call>
    pair := <arg_key> KEY </arg_key> gap* <arg_value> VALUE </arg_value> gap*

Rules where the grammar leaves room:
- A name is announced once it cannot be withdrawn cheaply: at ``</tool_call>`` of a call without arguments or at the
  first ``<arg_value>``. Argument JSON follows in pieces; string values stream character by character.
- An envelope that breaks the grammar, or names a function that was not offered, is no call: it stays in the text. When
  the break comes after the name was announced, the call never gets an ``END`` event (its JSON stays open, so nobody
  runs it) and the envelope's text is passed on as well.
- A call cut off by the end of the output is reported by ``CUT`` with its raw text when it was announced, else as text.
- Whitespace next to a call is dropped, as is whitespace before the first text; all other text is kept.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sgling.srt.parser.reasoning_parser import TOOL_OPEN, held_suffix
from sgling.srt.parser.tool_values import declared_types, escape_json, value_to_json

TOOL_CLOSE = "</tool_call>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"

MAX_NAME_LEN = 256  # characters; names, keys and gaps that are longer break the envelope, so little is ever held back
MAX_KEY_LEN = 1024
MAX_GAP_LEN = 256

_SPACES = rf"(?:\s|\\n){{0,{MAX_GAP_LEN}}}"
_NAME = re.compile(rf"\s{{0,{MAX_GAP_LEN}}}([\w.:/-]{{0,{MAX_NAME_LEN}}}){_SPACES}\\?")  # prefixes of a name match too
_GAP = re.compile(_SPACES)
_NEXT_CALL = re.compile(TOOL_CLOSE + _SPACES + TOOL_OPEN)
_NEXT_CALL_PREFIX = re.compile(
    rf"{TOOL_CLOSE}{_SPACES}(?:\\|" + "|".join(TOOL_OPEN[:size] for size in range(1, len(TOOL_OPEN))) + r")?\Z"
)


class EventKind(enum.Enum):
    """What a :class:`ToolEvent` carries in ``text``."""

    TEXT = "text"  # ordinary content
    NAME = "name"  # function name; once per call
    ARGUMENTS = "arguments"  # next piece of the call's argument JSON
    END = "end"  # the call is complete (empty text)
    CUT = "cut"  # the output ended inside an announced call: raw text of its envelope


class ToolEvent(NamedTuple):
    """One step of the output; ``index`` counts announced calls from 0."""

    kind: EventKind
    text: str
    index: int = -1


class ParsedCall(NamedTuple):
    """A complete call; ``arguments`` is the text of a JSON object."""

    index: int
    name: str
    arguments: str


class ParsedOutput(NamedTuple):
    """One-shot result."""

    text: str
    calls: list[ParsedCall]


def function_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The function object of a tool in OpenAI form (or of a bare function object)."""
    return tool.get("function") or tool


class ToolCallParser:
    """Streaming parser for one choice: :meth:`push` per piece of text, :meth:`finish` once at the end.

    ``tools`` are the offered tools. ``trim_start=False`` keeps whitespace before the first text, for outputs that
    continue an unfinished message.
    """

    def __init__(self, tools: list[dict[str, Any]], trim_start: bool = True) -> None:
        self._parameters = {function_of(tool)["name"]: function_of(tool).get("parameters") or {} for tool in tools}
        self.complete_calls = 0
        self._buffer = ""
        self._state: Callable[[], bool] = self._in_text
        self._events: list[ToolEvent] = []
        self._trim_start = trim_start
        self._last: EventKind | None = None  # kind of the last text or call given out
        self._spoke = False  # some text was given out
        self._index = -1
        self._open_call()

    def push(self, text: str) -> list[ToolEvent]:
        """Add text; return what is decided."""
        self._buffer += text
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ToolEvent]:
        """End of output: give out what was held back."""
        rest, self._buffer = self._buffer, ""
        if self._state == self._in_text:
            keep_space = self._last in (None, EventKind.TEXT)  # whitespace behind a call is dropped
            self._give_text(rest if keep_space else rest.rstrip())
        elif self._announced:
            space = self._space if self._spoke else ""
            self._give(EventKind.CUT, "".join([space, TOOL_OPEN, *self._raw, rest]))
        else:
            self._give_text("".join([self._space, TOOL_OPEN, *self._raw, rest]))
        self._state = self._in_text
        events, self._events = self._events, []
        return events

    # States: each reads the buffer and returns whether the next state may go on at once.

    def _in_text(self) -> bool:
        at = self._buffer.find(TOOL_OPEN)
        end = at if at >= 0 else len(self._buffer) - held_suffix(self._buffer, (TOOL_OPEN,))
        text = self._buffer[:end].rstrip()
        self._give_text(text)
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._open_call(self._buffer[len(text) : at])
        self._buffer = self._buffer[at + len(TOOL_OPEN) :]
        self._state = self._in_name
        return True

    def _in_name(self) -> bool:
        at = self._buffer.find("<")
        head = self._buffer if at < 0 else self._buffer[:at]
        match = _NAME.fullmatch(head)
        if match is None:
            return self._break()
        if at < 0:
            return False
        name = match[1]
        if name not in self._parameters or head.endswith("\\"):
            return self._break()
        self._name = name
        self._take(at)
        self._state = self._in_tag
        return True

    def _in_tag(self) -> bool:
        """Before ``<arg_key>`` or ``</tool_call>``."""
        tag = self._expect(KEY_OPEN, TOOL_CLOSE)
        if tag == KEY_OPEN:
            self._state = self._in_key
        elif tag == TOOL_CLOSE:
            self._announce()
            self._give(EventKind.ARGUMENTS, "}" if self._has_pairs else "{}")
            self._give(EventKind.END, "")
            self.complete_calls += 1
            self._state = self._in_text
        return bool(tag) or self._state == self._in_text

    def _in_key(self) -> bool:
        at = self._buffer.find("<")
        if (at if at >= 0 else len(self._buffer)) > MAX_KEY_LEN:
            return self._break()
        if at < 0:
            return False
        tail = self._buffer[at:]
        if not tail.startswith(KEY_CLOSE):
            return False if KEY_CLOSE.startswith(tail) else self._break()
        key = self._buffer[:at].strip()
        if not key:
            return self._break()
        self._key = key
        self._take(at + len(KEY_CLOSE))
        self._state = self._before_value
        return True

    def _before_value(self) -> bool:
        tag = self._expect(VALUE_OPEN)
        if not tag:
            return self._state == self._in_text
        self._announce()
        schema = self._parameters[self._name]
        properties = schema.get("properties") or {}
        self._types = declared_types(properties.get(self._key), schema)
        self._give(EventKind.ARGUMENTS, f'{", " if self._has_pairs else "{"}"{escape_json(self._key)}": ')
        if self._types == {"string"}:
            self._give(EventKind.ARGUMENTS, '"')
        self._has_pairs = True
        self._value = []
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        at = self._buffer.find(VALUE_CLOSE)
        restart = _NEXT_CALL.search(self._buffer)
        if restart and (at < 0 or restart.start() < at):
            return self._break()
        if at < 0:
            self._give_value(self._take(len(self._buffer) - self._held_in_value()))
            return False
        self._give_value(self._take(at))
        self._take(len(VALUE_CLOSE))
        is_string = self._types == {"string"}
        self._give(EventKind.ARGUMENTS, '"' if is_string else value_to_json("".join(self._value), self._types))
        self._state = self._in_tag
        return True

    # Helpers.

    def _open_call(self, space: str = "") -> None:
        """Reset what belongs to one envelope; ``space`` is the whitespace before it."""
        self._space = space
        self._raw: list[str] = []  # consumed text behind the opening tag
        self._announced = self._has_pairs = False
        self._name = self._key = ""
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []

    def _take(self, count: int) -> str:
        """Consume ``count`` characters of the envelope."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._raw.append(text)
        return text

    def _expect(self, *tags: str) -> str:
        """Skip a gap and consume one of ``tags``; empty when undecided, or after breaking the envelope."""
        start = _GAP.match(self._buffer).end()
        tail = self._buffer[start:]
        for tag in tags:
            if tail.startswith(tag):
                self._take(start + len(tag))
                return tag
        if tail != "\\" and not any(tag.startswith(tail) for tag in tags):
            self._break()
        return ""

    def _break(self) -> bool:
        """The envelope is malformed: its opening tag is text, and what follows it is read again as text."""
        self._buffer = "".join([*self._raw, self._buffer])
        self._give_text(self._space + TOOL_OPEN)
        self._state = self._in_text
        return True

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._index += 1
            self._give(EventKind.NAME, self._name)

    def _held_in_value(self) -> int:
        """How much of the buffer's end may be a closing tag, or the start of a call after a forgotten closing tag."""
        partial = _NEXT_CALL_PREFIX.search(self._buffer)
        held = held_suffix(self._buffer, (VALUE_CLOSE, TOOL_CLOSE))
        return max(held, len(self._buffer) - partial.start() if partial else 0)

    def _give_value(self, text: str) -> None:
        if self._types == {"string"}:
            self._give(EventKind.ARGUMENTS, escape_json(text))
        else:
            self._value.append(text)

    def _give_text(self, text: str) -> None:
        if not self._spoke and (self._trim_start or self._last is not None):
            text = text.lstrip()
        if text:
            self._spoke = True
            self._give(EventKind.TEXT, text)

    def _give(self, kind: EventKind, text: str) -> None:
        """Append an event; neighbours of one kind and call are joined."""
        self._last = kind
        index = -1 if kind is EventKind.TEXT else self._index
        mergeable = kind in (EventKind.TEXT, EventKind.ARGUMENTS)
        if mergeable and self._events and self._events[-1].kind is kind and self._events[-1].index == index:
            text = self._events.pop().text + text
        if text or not mergeable:
            self._events.append(ToolEvent(kind, text, index))


def parse_tool_calls(text: str, tools: list[dict[str, Any]], trim_start: bool = True) -> ParsedOutput:
    """One-shot form: content and complete calls of a finished output. An unfinished call stays in the content."""
    parser = ToolCallParser(tools, trim_start)
    return collect([*parser.push(text), *parser.finish()])


def collect(events: list[ToolEvent]) -> ParsedOutput:
    """Content and complete calls of all events of one output."""
    content, names, arguments, done = [], {}, {}, []
    for kind, text, index in events:
        if kind in (EventKind.TEXT, EventKind.CUT):
            content.append(text)
        elif kind is EventKind.NAME:
            names[index], arguments[index] = text, []
        elif kind is EventKind.ARGUMENTS:
            arguments[index].append(text)
        else:
            done.append(index)
    return ParsedOutput("".join(content), [ParsedCall(i, names[i], "".join(arguments[i])) for i in done])
