"""Incremental detokenizer: any grouping of ids gives the one-shot text, and nothing is shown that is taken back."""

from __future__ import annotations

import random
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from server.serving_helpers import small_tokenizer
from sgling.srt.managers.detokenizer import IncrementalDetokenizer
from sgling.srt.managers.finish import FinishChecker
from sgling.srt.managers.io_struct import FinishReason
from sgling.srt.managers.text_codec import TextCodec
from sgling.srt.sampling.sampling_params import SamplingParams

TEXTS = [
    "서울은 한국의 수도입니다. 안녕하세요 세계!",
    "가족 👩‍👩‍👧‍👦 와 깃발 🏳️‍🌈 그리고 👍🏽",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "plain text, then 漢字かな交じり文 and ÿþ",
]
LENGTH = FinishReason(type="length", length=1)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(small_tokenizer())


def stream(codec, ids, size, params=None, finish=LENGTH):
    """Every text shown while ids come in groups of ``size``."""
    detokenizer = IncrementalDetokenizer(codec, params or SamplingParams(), hold_back=True)
    groups = [ids[i : i + size] for i in range(0, len(ids), size)]
    return [detokenizer.push(group, finish if i == len(groups) - 1 else None) for i, group in enumerate(groups)]


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("text", TEXTS)
def test_every_grouping_gives_the_one_shot_text(codec, text, size):
    ids = codec.encode(text)
    assert len(ids) > len(text)  # characters are split over tokens, or the test is blind
    shown = stream(codec, ids, size)
    assert shown[-1] == small_tokenizer().decode(ids) == text
    for earlier, later in zip(shown, shown[1:], strict=False):
        assert later.startswith(earlier)
        assert "\ufffd" not in earlier


@pytest.mark.parametrize("size", range(1, 9))
def test_cut_inside_a_character_is_flushed_once_at_the_end(codec, size):
    ids = codec.encode("한국 안녕")
    for cut in range(1, len(ids)):
        shown = stream(codec, ids[:cut], size)
        assert shown[-1] == small_tokenizer().decode(ids[:cut])
        assert all("\ufffd" not in text for text in shown[:-1])


def test_random_ids_equal_the_library(codec):
    """Invalid UTF-8 anywhere: the same replacement characters as the tokenizers library."""
    rng = random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(290) for _ in range(rng.randrange(1, 30))]
        for skip in (True, False):
            want = small_tokenizer().decode(ids, skip_special_tokens=skip)
            assert codec.decode(ids, skip) == want
            params = SamplingParams(skip_special_tokens=skip)
            assert stream(codec, ids, rng.randrange(1, 5), params)[-1] == want


def test_added_tokens_stand_for_their_text():
    tokenizer = Tokenizer.from_str(small_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken("<|role end|>", special=True)])
    tokenizer.add_tokens(["<think>", "two words", "é"])
    codec = TextCodec(tokenizer)
    ids = tokenizer.encode("a<think>é two words<|role end|>b").ids
    for skip in (True, False):
        assert codec.decode(ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert tokenizer.token_to_id("<|role end|>") in codec.special_ids


def test_ids_beyond_the_tokenizer_are_empty(codec):
    assert codec.decode([511, 10**9, -1]) == ""


def test_other_tokenizers_are_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            tokenizer.decoder = decoder
        with pytest.raises(ValueError, match="byte-level"):
            TextCodec(tokenizer)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("stop", ["dog", "fox jum", "ox", "한국의", "lazy dog. T"])
def test_stop_strings_are_cut_and_never_shown(codec, stop, size):
    text = "The quick brown fox jumps 한국의 over the lazy dog. The"
    ids = codec.encode(text)
    end = next(n for n in range(1, len(ids) + 1) if stop in codec.decode(ids[:n]))
    finish = FinishReason(type="stop", matched=stop)
    shown = stream(codec, ids[:end], size, SamplingParams(stop=[stop, "zzz"]), finish)
    assert shown[-1] == text[: text.index(stop)]
    assert all(shown[-1].startswith(text) for text in shown)
    kept = stream(codec, ids[:end], size, SamplingParams(stop=[stop], no_stop_trim=True), finish)
    assert kept[-1] == codec.decode(ids[:end])


def test_stop_regex_is_cut_where_it_matched(codec):
    ids = codec.encode("an a, then xa")
    finish = FinishReason(type="stop", matched="a")
    params = SamplingParams(stop_regex=["(?<=x)a", "zzz"])
    assert stream(codec, ids, 3, params, finish)[-1] == "an a, then x"


@pytest.mark.parametrize("pattern", ["[^!]*!", "[^!]*[^!]*!", r"\w+ \w+!", "(?s)<a>.*</a>"])
@pytest.mark.parametrize("length", [12, 490, 500, 505, 3000])
def test_a_regex_cuts_where_the_scheduler_matched_also_at_the_edge_of_its_window(codec, pattern, length):
    ids = codec.encode("<a>" + "é word" * (length // 6) + "word! </a> tail")
    params = SamplingParams(stop_regex=[pattern])
    checker = FinishChecker(params, 10**6, frozenset(), codec)
    reasons = (checker.check(token, count) for count, token in enumerate(ids, 1))
    count, finish = next((count, reason) for count, reason in enumerate(reasons, 1) if reason is not None)
    seen = codec.decode(ids[:count])
    for size in (1, 7):
        shown = stream(codec, ids[:count], size, params, finish)[-1]
        assert seen.startswith(shown + finish.matched)


def test_text_held_for_a_stop_is_released(codec):
    ids = codec.encode("aab aab aac")
    shown = stream(codec, ids, 1, SamplingParams(stop=["aab aac"]), LENGTH)
    assert shown[-1] == "aab aab aac"
    detokenizer = IncrementalDetokenizer(codec, SamplingParams(stop=["aad"]), hold_back=True)
    assert detokenizer.push(codec.encode("xaa")) == "x"
    assert detokenizer.push(codec.encode("a")) == "xa"
    assert detokenizer.push(codec.encode("b")) == "xaaab"


def test_matched_stop_token_is_not_text(codec):
    ids = [*codec.encode("hello"), codec.encode("!")[0]]
    finish = FinishReason(type="stop", matched=ids[-1])
    assert stream(codec, ids, 2, finish=finish)[-1] == "hello"
    params = SamplingParams(no_stop_trim=True)
    assert stream(codec, ids, 2, params, finish)[-1] == "hello!"


def test_cost_is_linear(codec):
    """Ten times the tokens take about ten times as long, also when nothing can be shown and with a long stop."""

    def seconds(count: int, byte: str) -> float:
        token = small_tokenizer().token_to_id(byte)
        detokenizer = IncrementalDetokenizer(codec, SamplingParams(stop=["b" * 2000]), hold_back=True)
        begin = time.thread_time()
        for _ in range(count):
            detokenizer.push([token])
        return time.thread_time() - begin

    for byte in ("b", "ÿ"):
        seconds(500, byte)
        assert seconds(10_000, byte) < 30 * max(seconds(1000, byte), 1e-4)
