"""Prompts have exactly the asked number of tokens, as text and as ids, from packaged text, a file and bare ids."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sgling.bench.datasets import (
    RandomShape,
    fit_text,
    packaged_texts,
    random_id_prompts,
    random_text_prompts,
    sharegpt_texts,
)
from sgling.bench.tokenizer import FastTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> FastTokenizer:
    """A byte-level BPE trained on a part of the packaged text, so that cuts do merge and split tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(packaged_texts()[:6], trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    bpe.save(str(directory / "tokenizer.json"))
    return FastTokenizer(directory)


def fixed(input_len: int, count: int = 8, output_len: int = 4) -> RandomShape:
    return RandomShape(count, input_len, output_len, range_ratio=1.0, seed=42)


def test_packaged_texts_are_many_and_not_empty():
    texts = packaged_texts()
    assert len(texts) >= 10
    assert all(len(text) > 100 for text in texts)


@pytest.mark.parametrize("length", [1, 2, 32, 1024, 2000])
def test_text_prompts_tokenise_to_the_exact_length(tokenizer, length):
    prompts = random_text_prompts(fixed(length, count=20), tokenizer, packaged_texts())
    assert [len(tokenizer.encode(prompt.text)) for prompt in prompts] == [length] * 20
    assert all(prompt.input_len == length and prompt.text and prompt.output_len == 4 for prompt in prompts)


@pytest.mark.parametrize("length", [1, 2, 33, 500])
def test_id_prompts_are_consecutive(tokenizer, length):
    prompts = random_id_prompts(fixed(length), tokenizer)
    for prompt in prompts:
        assert prompt.text is None
        assert len(prompt.ids) == length
        assert set(np.diff(prompt.ids)) <= {1, 1 - tokenizer.vocab_size}


def test_ids_sent_as_text_are_exact_too(tokenizer):
    prompts = random_id_prompts(fixed(16, count=4), tokenizer, as_ids=False)
    assert [len(tokenizer.encode(prompt.text)) for prompt in prompts] == [16] * 4


def test_text_as_ids_repeats_one_text(tokenizer):
    (prompt,) = random_text_prompts(fixed(1000, count=1), tokenizer, ["one two three"], as_ids=True)
    period = len(tokenizer.encode("one two three"))
    assert prompt.text is None
    assert prompt.ids[:period] == tokenizer.encode("one two three")
    assert prompt.ids[period:] == prompt.ids[:-period]


def test_same_seed_same_prompts(tokenizer):
    def make(seed: int):
        return random_text_prompts(RandomShape(6, 40, 20, 0.0, seed), tokenizer, packaged_texts(), as_ids=True)

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_lengths_follow_the_range_ratio():
    rng = np.random.default_rng(0)
    inputs, outputs = zip(*RandomShape(2000, 10, 4, 0.5, 0).lengths(rng), strict=True)
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (5, 10, 2, 4)
    inputs, _ = zip(*RandomShape(2000, 3, 1, 0.0, 0).lengths(rng), strict=True)
    assert (min(inputs), max(inputs)) == (1, 3)


def test_sharegpt_file(tmp_path):
    file = tmp_path / "chats.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    assert sharegpt_texts(str(file)) == ["hello"]
    file.write_text("[]")
    with pytest.raises(ValueError, match="no conversation"):
        sharegpt_texts(str(file))


def test_impossible_length_is_an_error():
    class Doubling:
        """Every text has two tokens per character, so odd counts do not exist."""

        vocab_size = 10

        def encode(self, text):
            return [1] * (2 * len(text))

        def decode(self, ids):
            return "x" * len(ids)

    with pytest.raises(ValueError, match="exactly 3 tokens"):
        fit_text(Doubling(), [1, 2], 0, 3)


def test_missing_tokenizer_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        FastTokenizer(tmp_path)
