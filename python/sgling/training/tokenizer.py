"""Trains the embedded model's tokenizer: byte-level BPE, one digit a token, special tokens at the end of the id range.

``python -m sgling.training.tokenizer --output DIR`` writes ``tokenizer.json``, ``tokenizer_config.json`` and
``generation_config.json``. Only generated text and the Python standard library are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sgling.srt.config.train_args import TokenizerOptions

from .generator.mix import PICO_DIR, documents

BPE_SIZE = 6081
"""Ids 0 ... 6080 are BPE; 31 special tokens follow; the model's 6,144 rows are padded above that."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|role_end|>",
    "<|startoftext|>",
    "[gMASK]",
    "<role>",
    "</role>",
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
    "<|mask|>",
    *(f"<|reserved_{index}|>" for index in range(12)),
)
PAD_ID, EOS_ID = BPE_SIZE, BPE_SIZE + 1

SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)"  # contractions
    r"|\p{Han}{1,2}"  # short Han runs: no canned phrase becomes one token
    r"|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+"  # optional symbol and letters
    r"|\p{N}"  # one digit
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # symbols
    r"|\s*[\r\n]|\s+(?!\S)|\s+"  # line ends, trailing and other white space
)


def training_texts(count: int, seed: str) -> Iterator[str]:
    """Documents of the training mix, special tokens cut out so that they never take part in merges."""
    for document in islice(documents(seed, len), count):
        text = document.text
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        yield text


def train(count: int = 30_000, seed: str = "tokenizer") -> Tokenizer:
    """Trains on ``count`` documents; deterministic for a given generator and standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE, min_frequency=2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(training_texts(count, seed), trainer)
    if tokenizer.get_vocab_size() != BPE_SIZE:
        raise RuntimeError(f"BPE stopped at {tokenizer.get_vocab_size()} of {BPE_SIZE} tokens: give more text")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the three files ``AutoTokenizer`` and the server read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(BPE_SIZE + index): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for index, text in enumerate(SPECIAL_TOKENS)
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": "<|role_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {
        "eos_token_id": [EOS_ID, PAD_ID],
        "pad_token_id": PAD_ID,
        "temperature": 0.3,
        "top_p": 0.95,
        "top_k": 20,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    args = TokenizerOptions.parse("sgling.training.tokenizer")
    write(train(args.documents), args.output or PICO_DIR)


if __name__ == "__main__":
    main()
