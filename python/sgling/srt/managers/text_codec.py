"""Text to token ids and back, over a byte-level BPE tokenizer.

Every token of a byte-level vocabulary is a byte string, so decoding is a concatenation of bytes read as UTF-8. That
makes incremental decoding exact and linear: no window is ever decoded twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sgling.srt.config.flags import ServerArgsError

TOKENIZER_FILE = "tokenizer.json"


class TextCodec:
    """Encoder and byte table of one tokenizer.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` or a transformers fast tokenizer.

    Raises:
        ServerArgsError: the tokenizer is not byte-level (its tokens are no byte strings).
    """

    def __init__(self, tokenizer: Any):
        self.backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if "ByteLevel" not in _decoder_types(self.backend):
            raise ServerArgsError("only byte-level tokenizers are supported: the tokenizer's decoder is not ByteLevel")
        self.special_ids = frozenset(i for i, t in self.backend.get_added_tokens_decoder().items() if t.special)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokenizer's own special tokens; UnicodeEncodeError for lone surrogates."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """As :meth:`encode`, for many texts."""
        for text in texts:
            text.encode()
        return [encoding.ids for encoding in self.backend.encode_batch(texts)]  # unlike encode, lets other threads run

    @cached_property
    def most_chars_per_token(self) -> int | None:
        """Characters of text one token stands for, at most; None where the tokenizer may drop any number of them.

        A token of n bytes is n characters at most, before normalisation; NFC makes one of four at most.
        """
        state = json.loads(self.backend.to_str())
        normalizer = (state["normalizer"] or {"type": None})["type"]
        dropping = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
        if normalizer not in (None, "NFC") or dropping or not _keeps_text(state["pre_tokenizer"]):
            return None
        longest = max(len(self.token_bytes(i)) for i in self.backend.get_vocab(with_added_tokens=True).values())
        return longest * (4 if normalizer else 1)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for ids the tokenizer does not know (padding rows of the vocabulary)."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            found = self._bytes[token_id] = b"" if token is None else _byte_level(token)
        return found

    def join(self, ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        """Bytes of a token sequence."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole token sequence."""
        return self.join(ids, skip_special_tokens).decode("utf-8", errors="replace")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a directory, without any truncation or padding that its file may ask for.

    Raises ServerArgsError naming the file when it cannot be read.
    """
    path = directory / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ServerArgsError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_tokenizer(directory: Path) -> Path | None:
    """The directory if it holds a tokenizer, else None: such a model serves token ids only."""
    return directory if (directory / TOKENIZER_FILE).is_file() else None


def _keeps_text(pre_tokenizer: dict | None) -> bool:
    """Whether a pre-tokenizer passes every character on."""
    if pre_tokenizer is None or pre_tokenizer["type"] in ("ByteLevel", "Digits"):
        return True
    if pre_tokenizer["type"] == "Split":
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] == "Sequence" and all(map(_keeps_text, pre_tokenizer["pretokenizers"]))


def _decoder_types(backend: Any) -> set[str]:
    """Type names in a tokenizer's decoder, which may be a sequence."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {state["type"], *(part["type"] for part in state.get("decoders", ()))}


def _char_to_byte() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, the others for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_CHAR_TO_BYTE = _char_to_byte()


def _byte_level(token: str) -> bytes:
    """Bytes of a token; one with a character outside the alphabet (an added token) stands for its own text."""
    values = [_CHAR_TO_BYTE.get(char) for char in token]
    return token.encode() if None in values else bytes(values)
