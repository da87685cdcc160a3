"""Stop strings, regexes, stop tokens and limits, token by token over a real byte-level tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import sgling
from sgling.srt.managers.detokenizer import IncrementalDetokenizer
from sgling.srt.managers.finish import FinishChecker
from sgling.srt.managers.io_struct import FinishReason
from sgling.srt.managers.text_codec import TextCodec
from sgling.srt.sampling.sampling_params import SamplingParams

PICO = Path(sgling.__file__).parent / "assets" / "ling3-pico"
TEXT = "Continue: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13. Grüße, 你好世界 🎉 end."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PICO / "tokenizer.json"))


def run(tokenizer, text: str = TEXT, limit: int = 10_000, eos=frozenset(), **params):
    """(decoded text through the stop, reason) of a request whose model emits ``text``."""
    ids = tokenizer.encode(text).ids
    checker = FinishChecker(SamplingParams(**params), limit, eos, TextCodec(tokenizer))
    for count, token in enumerate(ids, 1):
        reason = checker.check(token, count)
        if reason is not None:
            return tokenizer.decode(ids[:count]), reason
    return text, None


@pytest.mark.parametrize("stop", ["9", " 12,", "2, 3", "世界", "🎉 e", "ße", "Continue"])
def test_a_stop_string_ends_at_the_token_that_completes_it(tokenizer, stop):
    text, reason = run(tokenizer, stop=[stop])
    assert (reason.type, reason.matched) == ("stop", stop)
    assert stop in text
    shorter = tokenizer.decode(tokenizer.encode(TEXT).ids[: len(tokenizer.encode(text).ids) - 1])
    assert stop not in shorter


def test_the_earliest_of_several_stops_wins(tokenizer):
    assert run(tokenizer, stop=["zzz", "11", "4"])[1].matched == "4"


def test_no_match_never_stops(tokenizer):
    assert run(tokenizer, stop=["zzz"])[1] is None


def test_a_regex_sees_text_across_tokens(tokenizer):
    text, reason = run(tokenizer, stop_regex=[r"1[01], 1[12]"])
    assert reason.matched == "10, 11"
    assert text.endswith("10, 11")


def test_stop_string_beats_a_stop_token_on_the_same_token(tokenizer):
    token = tokenizer.encode(TEXT).ids[-1]
    assert run(tokenizer, stop=["."], stop_token_ids=[token])[1].matched == "."


def test_stop_beats_length_on_the_same_token(tokenizer):
    count = len(tokenizer.encode(TEXT).ids)
    token = tokenizer.encode(TEXT).ids[-1]
    reason = run(tokenizer, limit=count, stop_token_ids=[token])[1]
    assert reason.type == "stop"


def test_ignore_eos_ignores_eos_but_not_the_requests_own_stop_ids(tokenizer):
    ids = tokenizer.encode(TEXT).ids
    assert run(tokenizer, eos=frozenset({ids[3]}))[1].matched == ids[3]
    assert run(tokenizer, eos=frozenset({ids[3]}), ignore_eos=True)[1] is None
    assert run(tokenizer, eos=frozenset({ids[3]}), ignore_eos=True, stop_token_ids=[ids[3]])[1].matched == ids[3]


def test_a_stop_is_seen_in_the_text_the_client_sees_also_amid_broken_characters(tokenizer):
    """Cases C01, C04: a token may complete a stop and begin a character whose rest never comes."""
    codec, rng = TextCodec(tokenizer), random.Random(0)
    bytes_only = [i for i in range(tokenizer.get_vocab_size()) if len(codec.token_bytes(i)) <= 2]
    for _ in range(200):
        ids = rng.choices(bytes_only, k=40)
        shown = codec.decode(ids)
        stop = shown[(at := rng.randrange(len(shown) // 2)) : at + 2]
        if "\ufffd" in stop:
            continue
        params = SamplingParams(stop=[stop])
        checker = FinishChecker(params, 10_000, frozenset(), codec)
        count = next(n for n, token in enumerate(ids, 1) if checker.check(token, n))
        assert stop in codec.decode(ids[:count]) and stop not in codec.decode(ids[: count - 1])
        reason = FinishReason(type="stop", matched=stop)
        text = IncrementalDetokenizer(codec, params, hold_back=True).push(ids[:count], reason)
        assert text == shown[: shown.find(stop)]


def test_text_stops_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="tokenizer"):
        FinishChecker(SamplingParams(stop=["a"]), 5, frozenset(), None)
