"""Reads ``--speculative-token-map``: the token ids a drafter may propose (scripts/build_token_map.py writes one)."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from sgling.srt.config.flags import ServerArgsError

_FLAG = "--speculative-token-map"


def read_token_map(path: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of a map in ascending order, so that the lowest column is the lowest id.

    The file is a JSON list of integers or, with the ending ``.pt``, a saved list or one-dimensional integer tensor.
    Raises ServerArgsError naming the flag: unreadable, empty, not token ids of the vocabulary, or repeated ids.
    """
    ids = _read(Path(path))
    if not ids:
        raise ServerArgsError(f"{_FLAG} {path}: the list is empty")
    strange = [value for value in ids if isinstance(value, bool) or not isinstance(value, int)]
    if strange:
        raise ServerArgsError(f"{_FLAG} {path}: {strange[0]!r} is not a token id")
    outside = [value for value in ids if not 0 <= value < vocab_size]
    if outside:
        raise ServerArgsError(f"{_FLAG} {path}: id {outside[0]} is outside the vocabulary of {vocab_size}")
    if len(set(ids)) != len(ids):
        raise ServerArgsError(f"{_FLAG} {path}: {len(ids) - len(set(ids))} ids are repeated")
    return tuple(sorted(ids))


def _read(path: Path) -> list:
    try:
        content = _read_tensor(path) if path.suffix == ".pt" else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise ServerArgsError(f"{_FLAG} {path}: {error}") from error
    if not isinstance(content, list):
        raise ServerArgsError(f"{_FLAG} {path}: not a list of token ids")
    return content


def _read_tensor(path: Path) -> object:
    import torch  # here, so that --help and usage errors do not wait for it

    content = torch.load(path, weights_only=True)
    return content.tolist() if isinstance(content, torch.Tensor) else content
