"""The client's tokenizer: encodes as the server will, and decodes without dropping anything."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class BenchTokenizer(Protocol):
    """What the data sets need of a tokenizer."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens of the template included."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens included."""


class FastTokenizer:
    """A ``tokenizer.json`` file, read by the tokenizers library alone."""

    def __init__(self, directory: Path):
        from tokenizers import Tokenizer

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {directory}")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=False)

    def encode(self, text: str) -> list[int]:
        """See :class:`BenchTokenizer`."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """See :class:`BenchTokenizer`."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)
