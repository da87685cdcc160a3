"""When a request ends, decided token by token.

A step may commit several tokens. They are examined in order with the same rules as if each had come alone, so a run is
cut exactly where plain decoding would have stopped. Order for one token: stop string or regex, stop token or EOS,
length.
"""

from __future__ import annotations

import codecs

from sgling.srt.managers.io_struct import FinishReason
from sgling.srt.managers.text_codec import TextCodec
from sgling.srt.sampling.sampling_params import SamplingParams
from sgling.srt.sampling.stop_regex import compile_stop_regex


class StopMatcher:
    """Finds stop strings and regexes in the text of a growing output; for strings linear in its length.

    The text is the one the client sees: same codec, and an incomplete character waits for its rest. Strings are
    searched in a tail one character shorter than the longest stop plus the new piece, a regex in its own window.
    """

    def __init__(self, params: SamplingParams, codec: TextCodec):
        self._codec = codec
        self._skip_special_tokens = params.skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = list(params.stop or [])
        self._regexes = [compile_stop_regex(pattern) for pattern in params.stop_regex or []]
        self._tail_len = max((len(stop) for stop in self._stops), default=1) - 1
        self._text = ""

    def step(self, token_id: int) -> str | None:
        """Append one token; returns the stop (or the text a regex matched) that is now complete."""
        new = self._codec.join((token_id,), self._skip_special_tokens)
        piece = self._decoder.decode(new)
        if not piece:
            return None
        keep = self._text if self._regexes else self._text[max(0, len(self._text) - self._tail_len) :]
        self._text = keep + piece
        hits = [(self._text.find(stop), stop) for stop in self._stops]
        matches = [regex.search(self._text, len(new)) for regex in self._regexes]
        hits += [(match.start(), match.group()) for match in matches if match]
        found = [hit for hit in hits if hit[0] >= 0]
        return min(found)[1] if found else None


class FinishChecker:
    """Stop rules of one request."""

    def __init__(self, params: SamplingParams, max_new_tokens: int, eos_ids: frozenset[int], codec: TextCodec | None):
        self._max_new_tokens = max_new_tokens
        self._stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_ids)
        wants_text = bool(params.stop or params.stop_regex)
        if wants_text and codec is None:
            raise ValueError("stop strings need a tokenizer, and this model directory has none")
        self._matcher = StopMatcher(params, codec) if wants_text else None

    def check(self, token_id: int, output_len: int) -> FinishReason | None:
        """Reason to stop at this token; ``output_len`` counts it."""
        matched = self._matcher.step(token_id) if self._matcher else None
        if matched is not None:
            return FinishReason(type="stop", matched=matched)
        if token_id in self._stop_ids:
            return FinishReason(type="stop", matched=token_id)
        if output_len >= self._max_new_tokens:
            return FinishReason(type="length", length=output_len)
        return None
