"""Reasoning parser: every way of cutting an output into pieces gives the same split (case D03)."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgling.srt.parser.reasoning_parser import ReasoningParser, ReasoningPiece, prompt_opens_reasoning, split_reasoning

CALL = "<tool_call>now</tool_call>"
CASES = {
    "d03": ("<think>abc</think>normal", "abc", "normal"),
    "no opening tag": ("abc</think>normal", "abc", "normal"),
    "newlines": ("\n<think>\n\nabc\n\nd\n</think>\n\nnormal\n", "abc\n\nd", "normal\n"),
    "two blocks": ("<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
    "two openings": ("<think><think>a</think>b", "<think>a", "b"),
    "call behind": (f"a</think>{CALL}", "a", CALL),
    "call ends reasoning": (f"a\n{CALL}</think>x", "a", f"{CALL}</think>x"),
    "cut in the tag": ("abc</thi", "abc</thi", ""),
    "cut in the call tag": ("abc<tool", "abc<tool", ""),
    "cut in the opening tag": ("<thi", "<thi", ""),
    "only an opening tag": ("<think>", "", ""),
    "unclosed": ("a < b\n", "a < b", ""),
    "nearly tags": ("a</think b</tool_call><thinker></think>c", "a</think b</tool_call><thinker>", "c"),
    "empty reasoning": ("</think>x", "", "x"),
    "empty": ("", "", ""),
    "newlines only": ("\n\n", "", ""),
    "spaces are kept": ("  a  </think>  b", "  a  ", "  b"),
}


def run(pieces, in_reasoning=True):
    parser = ReasoningParser(in_reasoning)
    found = [*map(parser.push, pieces), parser.finish()]
    return ReasoningPiece("".join(p.reasoning for p in found), "".join(p.content for p in found))


@pytest.mark.parametrize("text, reasoning, content", CASES.values(), ids=CASES)
def test_all_chunk_sizes(text, reasoning, content):
    assert split_reasoning(text) == (reasoning, content)
    for size in range(1, 31):
        assert run([text[i : i + size] for i in range(0, len(text), size)]) == (reasoning, content)


def test_thinking_off_passes_everything():
    text = "\nx</think><think>y"
    assert run(list(text), in_reasoning=False) == ("", text)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "\n", "a", "<", "</", "think>", " "]), max_size=9
    ),
    cuts=st.sets(st.integers(0, 60)),
)
def test_any_cut_equals_one_shot(parts, cuts):
    text = "".join(parts)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert run([text[a:b] for a, b in pairwise(edges)]) == split_reasoning(text)


def test_text_is_given_out_as_soon_as_it_is_decided():
    parser = ReasoningParser()
    assert parser.push("Because ") == ("Because ", "")
    assert parser.push("of <") == ("of ", "")
    assert parser.push("/think>So") == ("<"[:0], "So")
    assert not parser.in_reasoning


@pytest.mark.parametrize(
    "prompt, opens",
    [
        ("...\n<think>", True),
        ("...\n<think></think>", False),
        ("<think>a</think>b ... <think>half", True),
        ("plain", False),
    ],
)
def test_prompt_decides_where_output_starts(prompt, opens):
    assert prompt_opens_reasoning(prompt) is opens
