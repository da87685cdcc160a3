"""Stop regexes that could stall the scheduler are refused by shape; ordinary ones are not."""

from __future__ import annotations

import pytest

from sgling.srt.sampling.sampling_params import SamplingParams, SamplingParamsError
from sgling.srt.sampling.stop_regex import why_not_searchable


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a*)*b",
        "(a|aa)+$",
        "(?:x+x+)+y",
        "([a-z]+\\s*)*$",
        "((ab)*)+",
        "(a+){100}b",
        "(a)\\1+",
        "(.*?,){200}",
    ],
)
def test_exponential_shapes_are_refused_with_400_text(pattern):
    with pytest.raises(SamplingParamsError, match="stop_regex"):
        SamplingParams(stop_regex=[pattern]).verify(100)


@pytest.mark.parametrize(
    "pattern", [r"\d+\s*km", r"END.*", r"(foo|bar)\d{1,3}", r"[A-Z]{2,40}\.", r"(?i)stop here", r"a(bc)*d", "^x$"]
)
def test_ordinary_patterns_pass(pattern):
    assert why_not_searchable(pattern) is None
    SamplingParams(stop_regex=[pattern]).verify(100)


def test_an_invalid_pattern_is_named():
    with pytest.raises(SamplingParamsError, match=r"stop_regex '\(' is invalid"):
        SamplingParams(stop_regex=["("]).verify(100)
