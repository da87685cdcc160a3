"""A target's text format and identity: tokenizer, chat template, ids, and hashes that data must agree with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.parser.chat_template import ChatTemplate

from ..data import Marks

FILES = {"tokenizer": "tokenizer.json", "template": "chat_template.jinja"}


class Identity(NamedTuple):
    """Hashes of weights, tokenizer and chat template, and the number of token ids."""

    target: str
    tokenizer: str
    template: str
    vocab_size: int


def digest(paths: list[Path]) -> str:
    """Short SHA-256 over the bytes of files."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


class TextFormat:
    """What text of a target looks like.

    Attributes:
        directory, config: where the target lies, and its shape.
        end, pad: token that ends an answer, token that fills rows.
    """

    def __init__(self, name: str) -> None:
        """Raises ServerArgsError when a file is missing or the tokenizer does not fit the model."""
        self.directory = resolve_model_path(name)
        for kind, file in FILES.items():
            if not (self.directory / file).is_file():
                raise ServerArgsError(f"--target {name}: no {kind} ({self.directory / file}): answers need one")
        self.config = ModelConfig.from_dir(self.directory)
        self.tokenizer = Tokenizer.from_file(str(self.directory / FILES["tokenizer"]))
        self.template = ChatTemplate.from_file(self.directory / FILES["template"])
        size, rows = self.tokenizer.get_vocab_size(), self.config.vocab_size
        if size > rows:
            raise ServerArgsError(f"--target {name}: the tokenizer has {size} ids, the embedding only {rows} rows")
        self.marks = Marks.of(self.tokenizer)
        if None in self.marks[:3]:
            raise ServerArgsError(f"--target {name}: no <role> grammar in the tokenizer: where are assistant turns?")
        self.end = self.marks.role_end
        self.pad = 0 if self.config.pad_token_id is None else self.config.pad_token_id

    def identity(self) -> Identity:
        """Hashes of what is on disk."""
        weights = [*sorted(self.directory.glob("*.safetensors")), self.directory / "config.json"]
        files = {kind: digest([self.directory / file]) for kind, file in FILES.items()}
        return Identity(digest(weights), files["tokenizer"], files["template"], self.config.vocab_size)
