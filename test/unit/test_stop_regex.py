"""Stop regexes that could stall the scheduler are refused by shape; ordinary ones are not, and are found."""

from __future__ import annotations

import re
import time

import pytest

from sgling.srt.sampling.sampling_params import SamplingParams, SamplingParamsError
from sgling.srt.sampling.stop_regex import compile_stop_regex

EXPONENTIAL = [
    "(a+)+$", "(a*)*b", "(a|aa)+$", "(?:x+x+)+y", "([a-z]+\\s*)*$", "((ab)*)+", "(a+){100}b", "(a)\\1+", "(.*?,){200}",
    "(?P<q>['\"])x(?(q)y|z)", "(foo|foofoo){0,62}z", "x?" * 40 + "x" * 40, "((a{0,60}){0,60}){0,60}b",
]  # fmt: skip
POLYNOMIAL = ["[^y]*[^y]*[^y]*y", ".*\\d+.*\\d+y", "\\s+\\s+\\s+$", ".*.*=.*", "\\w*\\d*[a-z0-9]*!"]
ORDINARY = [
    r"\d+\s*km", r"END.*", r"(foo|bar)\d{1,3}", r"[A-Z]{2,40}\.", r"(?i)stop here", r"a(bc)*d", "^x$",
    r"\d+\.\d+\s*USD", r"\n+\s*Question", r"(Human|User|Assistant)\s*:\s*", r"(?s)```python.*?```", r"\n\n.*:\s*$",
    r"\w+\s*:\s*\d+", r"(\w+ ){3,5}", r"(\d{1,3},){0,20}", "[\u4e00-\u9fff]+。", r"(?<=x)a|\bend\b", r"[^y]*[^y]*y",
]  # fmt: skip
HOSTILE = ["a" * 20_000, "1" * 20_000, " " * 20_000, "1," * 10_000, "ab " * 7000, "x" * 20_000]
SLOWEST_S = 2.0  # of one search on a busy machine; the refused ones would take from minutes to years


@pytest.mark.parametrize("pattern", EXPONENTIAL + POLYNOMIAL)
def test_shapes_that_can_stall_are_refused_with_400_text(pattern):
    with pytest.raises(SamplingParamsError, match="stop_regex"):
        SamplingParams(stop_regex=[pattern]).verify(100)


@pytest.mark.parametrize("pattern", ["(" * 3000 + ")" * 3000, "(" * 900 + "a" + ")" * 900, "(" * 40 + "a" + ")" * 40])
def test_deep_nesting_is_refused_and_not_a_recursion_error(pattern):
    """It was a 500, and the same pattern inside the scheduler would have ended it."""
    with pytest.raises(SamplingParamsError, match="nested|characters"):
        SamplingParams(stop_regex=[pattern]).verify(100)


@pytest.mark.parametrize("pattern", ["a" * 3000, "a{5000}", "a{99999999999}", "\\w{4096}\\w{4096}"])
def test_what_cannot_be_searched_is_refused(pattern):
    with pytest.raises(SamplingParamsError, match="stop_regex"):
        SamplingParams(stop_regex=[pattern]).verify(100)


@pytest.mark.parametrize("pattern", ORDINARY)
def test_ordinary_patterns_pass_and_no_text_makes_them_slow(pattern):
    SamplingParams(stop_regex=[pattern]).verify(100)
    regex = compile_stop_regex(pattern)
    for text in HOSTILE:
        begin = time.perf_counter()
        regex.search(text, 3)
        assert time.perf_counter() - begin < SLOWEST_S


@pytest.mark.parametrize(("pattern", "text"), [
    (r"(?s)```python.*?```", "x" * 9000 + "```python\n" + "print(1)\n" * 300 + "```"),
    (r"\d{4}-\d{2}-\d{2}", "1" * 9000 + " on 2026-11-30"),
    (r"END.*", "no " * 5000 + "END of it"),
    (r"(?<=x)a", "a" * 5000 + "xa"),
])  # fmt: skip
def test_a_match_at_the_end_of_a_long_text_is_the_one_of_the_whole_text(pattern, text):
    assert compile_stop_regex(pattern).search(text, 3).span() == re.search(pattern, text).span()


def test_anchors_mean_the_whole_text():
    regex = compile_stop_regex("^b$")
    assert regex.search("a" * 5000 + "b", 1) is None
    assert regex.search("b", 1) is not None


def test_an_invalid_pattern_is_named():
    with pytest.raises(SamplingParamsError, match=r"stop_regex '\(' is invalid"):
        SamplingParams(stop_regex=["("]).verify(100)
