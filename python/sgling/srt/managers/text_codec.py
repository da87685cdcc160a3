"""Text to token ids and back, over a byte-level BPE tokenizer.

Every token of a byte-level vocabulary is a byte string, so decoding is a concatenation of bytes read as UTF-8. That
makes incremental decoding exact and linear: no window is ever decoded twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class TextCodec:
    """Encoder and byte table of one tokenizer.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` or a transformers fast tokenizer.

    Raises:
        ValueError: the tokenizer is not byte-level (its tokens are no byte strings).
    """

    def __init__(self, tokenizer: Any):
        self.backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if "ByteLevel" not in _decoder_types(self.backend):
            raise ValueError("only byte-level tokenizers are supported: the tokenizer's decoder is not ByteLevel")
        self.special_ids = frozenset(i for i, t in self.backend.get_added_tokens_decoder().items() if t.special)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokenizer's own special tokens; UnicodeEncodeError for lone surrogates."""
        text.encode()
        return self.backend.encode_batch([text])[0].ids  # unlike encode, this lets other threads run

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

    Raises ValueError naming the file when it cannot be read.
    """
    path = directory / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_tokenizer(directory: Path) -> Path | None:
    """The directory if it holds a tokenizer, else None: such a model serves token ids only."""
    return directory if (directory / TOKENIZER_FILE).is_file() else None


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
