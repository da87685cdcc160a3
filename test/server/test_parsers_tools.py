"""Tool call parser: calls, arguments and text are the same for every way of cutting the output (case D02)."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgling.srt.parser.tool_call_parser import EventKind, ToolCallParser, collect, parse_tool_calls
from sgling.srt.parser.tool_values import declared_types, value_to_json


def tool(name, **properties):
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add", x="integer", y="number", tag="string"), tool("now"), tool("put", data="object", on="boolean")]


def pair(key, value, gap="\n"):
    return f"<arg_key>{key}</arg_key>{gap}<arg_value>{value}</arg_value>"


def call(name, *pairs, sep="\n"):
    return f"<tool_call>{name}{sep}{''.join(pairs)}</tool_call>"


ADD = call("add", pair("x", 3), "\n", pair("tag", "3"), "\n")
ADD_JSON = '{"x": 3, "tag": "3"}'
CASES = {
    "one": (ADD, "", [("add", ADD_JSON)]),
    "no separator": (call("add", pair("x", 3, gap=""), sep=""), "", [("add", '{"x": 3}')]),
    "escaped newline": (call("add", pair("x", 3, gap="\\n"), sep="\\n"), "", [("add", '{"x": 3}')]),
    "no arguments": ("<tool_call>now</tool_call>", "", [("now", "{}")]),
    "no arguments, newline": ("<tool_call>\nnow\n</tool_call>", "", [("now", "{}")]),
    "text before": (f"I will look.\n\n{ADD}", "I will look.", [("add", ADD_JSON)]),
    "text around two": (f" Look: {ADD}\n{call('now')}\nDone. ", "Look:\nDone. ", [("add", ADD_JSON), ("now", "{}")]),
    "text after only": (f"{ADD}\n\nDone.", "Done.", [("add", ADD_JSON)]),
    "raw strings": (
        call("add", pair("tag", ' "q"\n\\n <b> & </arg>é\t')),
        "",
        [("add", json.dumps({"tag": ' "q"\n\\n <b> & </arg>é\t'}, ensure_ascii=False))],
    ),
    "closing tag in a string": (
        call("add", pair("tag", "a</tool_call>b <tool_call>c")),
        "",
        [("add", '{"tag": "a</tool_call>b <tool_call>c"}')],
    ),
    "object": (
        call("put", pair("data", '{"a": [1, 2.5]}'), pair("on", "true")),
        "",
        [("put", '{"data": {"a": [1, 2.5]}, "on": true}')],
    ),
    "undeclared": (call("now", pair("z", "7"), pair("w", "seven")), "", [("now", '{"z": 7, "w": "seven"}')]),
    "no call": ("a < b <tool", "a < b <tool", []),
    "plain text keeps its end": ("text \n", "text \n", []),
    "unknown name": (f"x {call('nope')}", f"x {call('nope')}", []),
    "json envelope": (
        '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>',
        [],
    ),
    "json behind the name": ('<tool_call>add\n{"x": 1}</tool_call>', '<tool_call>add\n{"x": 1}</tool_call>', []),
    "value without key": (
        "<tool_call>add<arg_value>1</arg_value></tool_call>",
        "<tool_call>add<arg_value>1</arg_value></tool_call>",
        [],
    ),
    "key without value": (
        "<tool_call>add<arg_key>x</arg_key></tool_call>",
        "<tool_call>add<arg_key>x</arg_key></tool_call>",
        [],
    ),
    "empty name": ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    "broken, then good": (f"<tool_call>add 1{ADD}", "<tool_call>add 1", [("add", ADD_JSON)]),
    "value not closed, then good": (
        f"<tool_call>add<arg_key>x</arg_key><arg_value>1</tool_call>\n{call('now')}",
        "<tool_call>add<arg_key>x</arg_key><arg_value>1</tool_call>",
        [("now", "{}")],
    ),
    "endless gap": ("<tool_call>now" + "\n" * 300 + "x", "<tool_call>now" + "\n" * 300 + "x", []),
    "endless name": ("<tool_call>" + "n" * 300, "<tool_call>" + "n" * 300, []),
    "endless key": ("<tool_call>now<arg_key>" + "n" * 1100, "<tool_call>now<arg_key>" + "n" * 1100, []),
    "cut in the name": ("ok <tool_call>ad", "ok <tool_call>ad", []),
    "cut in a value": (f"ok {call('add', pair('x', 3))[:-18]}", f"ok {call('add', pair('x', 3))[:-18]}", []),
    "cut before the close": (ADD[:-3], ADD[:-3], []),
}


def run(pieces, tools=TOOLS):
    parser = ToolCallParser(tools)
    events = [event for piece in pieces for event in parser.push(piece)]
    return collect(events + parser.finish()), parser


@pytest.mark.parametrize("text, content, calls", CASES.values(), ids=CASES)
def test_all_chunk_sizes(text, content, calls):
    for size in range(1, min(len(text), 200) + 1):
        found, parser = run([text[i : i + size] for i in range(0, len(text), size)])
        assert found.text == content
        assert [(name, arguments) for _, name, arguments in found.calls] == calls
        assert all(isinstance(json.loads(arguments), dict) for _, _, arguments in found.calls)
        assert parser.complete_calls == len(calls)
    assert parse_tool_calls(text, TOOLS) == found


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "add",
    "now",
    "x",
    "tag",
    "3",
    "\n",
    " ",
    "\\n",
    "\\",
    "<",
    "é",
    '"',
    ADD,
]


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14), cuts=st.sets(st.integers(0, 160)))
def test_any_cut_equals_one_shot(parts, cuts):
    text = "".join(parts)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert run([text[a:b] for a, b in pairwise(edges)])[0] == parse_tool_calls(text, TOOLS)


def test_stream_gives_name_once_and_arguments_in_pieces():
    text = call("add", pair("tag", "a long text"))
    parser = ToolCallParser(TOOLS)
    events = [event for char in text for event in parser.push(char)]
    assert [event.text for event in events if event.kind is EventKind.NAME] == ["add"]
    pieces = [event.text for event in events if event.kind is EventKind.ARGUMENTS]
    assert len(pieces) > 10 and "".join(pieces) == '{"tag": "a long text"}'
    assert {event.index for event in events} == {0}


def test_cut_announced_call_is_reported_with_its_raw_text():
    text = "<tool_call>add\n<arg_key>tag</arg_key><arg_value>half"
    parser = ToolCallParser(TOOLS)
    events = parser.push(text) + parser.finish()
    assert [(kind, body) for kind, body, _ in events] == [
        (EventKind.NAME, "add"),
        (EventKind.ARGUMENTS, '{"tag": "half'),
        (EventKind.CUT, text),
    ]


def test_continued_message_keeps_its_space():
    assert parse_tool_calls(" world", TOOLS, trim_start=False).text == " world"


@pytest.mark.parametrize(
    "text, types, expected",
    [
        ("3", {"integer"}, "3"),
        ("3.0", {"integer"}, "3"),
        ("3.5", {"integer"}, "3.5"),
        ("3.0", {"number"}, "3.0"),
        ("3", {"string"}, '"3"'),
        ("true", {"string"}, '"true"'),
        ("True", {"boolean"}, "true"),
        ("None", {"null"}, "null"),
        (" [1,\n2] ", {"array"}, "[1, 2]"),
        ("{'a': 'b'}", {"object"}, '{"a": "b"}'),
        ('{\\"a\\": 1}', {"object"}, '{"a": 1}'),
        ("{not json", {"object"}, '"{not json"'),
        ("NaN", {"number"}, '"NaN"'),
        ("1e999", {"number"}, '"1e999"'),
        ("null", {"string", "null"}, "null"),
        ("3", {"string", "null"}, '"3"'),
        ("3", {"string", "number"}, "3"),
        ('"q"', {"string", "null"}, '"\\"q\\""'),
        ("hello", set(), '"hello"'),
        ("42", set(), "42"),
        ('"42"', set(), '"42"'),
        ("[" * 100000, set(), json.dumps("[" * 100000)),
    ],
)
def test_values(text, types, expected):
    assert value_to_json(text, frozenset(types)) == expected


def test_declared_types():
    root = {"$defs": {"unit": {"enum": ["C", "F"]}, "loop": {"$ref": "#/$defs/loop"}}}
    assert declared_types({"$ref": "#/$defs/unit"}, root) == {"string"}
    assert declared_types({"$ref": "#/$defs/loop"}, root) == frozenset()
    assert declared_types({"anyOf": [{"type": "integer"}, {"type": "null"}]}, root) == {"integer", "null"}
    assert declared_types({"type": ["string", "null"]}, root) == {"string", "null"}
    assert declared_types({"const": True}, root) == {"boolean"}
    assert declared_types(None, root) == declared_types({}, root) == frozenset()
