"""Native logprob triples ``[logprob, token id, text]`` to the two OpenAI forms."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

Triple = list  # [logprob | None, token id, text]


class LogprobCursor:
    """Walks through the cumulative logprob lists of one choice, so that a chunk gets its own tokens only."""

    def __init__(self) -> None:
        self._seen = 0

    def take(self, meta: dict[str, Any]) -> tuple[list[Triple], list[list[Triple] | None]]:
        """Tokens since the last call, and their alternatives (empty when none were asked for)."""
        tokens = meta.get("output_token_logprobs") or []
        tops = meta.get("output_top_logprobs") or []
        start, self._seen = self._seen, len(tokens)
        return tokens[start:], tops[start:]


def prompt_logprobs(meta: dict[str, Any]) -> tuple[list[Triple], list[list[Triple] | None]]:
    """The prompt's tokens and alternatives; the first token has no logprob."""
    return meta.get("input_token_logprobs") or [], meta.get("input_top_logprobs") or []


def completion_logprobs(tokens: list[Triple], tops: list[list[Triple] | None]) -> dict[str, Any]:
    """Parallel lists of ``/v1/completions``. Alternatives with equal text keep the likeliest."""
    return {
        "tokens": [text for _, _, text in tokens],
        "token_logprobs": [logprob for logprob, _, _ in tokens],
        "top_logprobs": [_by_text(top) for _, top in zip_longest(tokens, tops[: len(tokens)])] if tops else None,
        "text_offset": [-1] * len(tokens),
    }


def chat_logprobs(
    tokens: list[Triple], tops: list[list[Triple] | None], token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    """``{"content": [{token, bytes, logprob, top_logprobs}]}``. ``token_bytes`` gives a token's true bytes."""

    def entry(triple: Triple) -> dict[str, Any]:
        """One token or alternative."""
        logprob, token_id, text = triple
        return {"token": text, "bytes": list(token_bytes(token_id)), "logprob": logprob}

    rows = zip_longest(tokens, tops[: len(tokens)])
    return {"content": [{**entry(token), "top_logprobs": [entry(alt) for alt in top or ()]} for token, top in rows]}


def _by_text(top: list[Triple] | None) -> dict[str, float] | None:
    if top is None:
        return None
    found: dict[str, float] = {}
    for logprob, _, text in top:
        found[text] = max(logprob, found.get(text, logprob))
    return found
