"""Incremental detokenizer of one request: ids in, text that may be shown out.

Bytes go through an incremental UTF-8 decoder, so an incomplete character waits for its rest and any grouping of the
ids gives the same text. While a stream runs, a tail that could be the start of a stop string is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sgling.srt.managers.io_struct import FinishReason
from sgling.srt.managers.text_codec import TextCodec
from sgling.srt.sampling.sampling_params import SamplingParams
from sgling.srt.sampling.stop_regex import compile_stop_regex

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class StopPrefix:
    """Length of the longest tail of a text that is a proper prefix of one stop string (Knuth-Morris-Pratt)."""

    def __init__(self, stop: str):
        self._stop = stop
        self._fail = [0] * len(stop)
        matched = 0
        for i in range(1, len(stop)):
            matched = self._next(matched, stop[i])
            self._fail[i] = matched
        self.length = 0

    def _next(self, matched: int, char: str) -> int:
        while matched and (matched == len(self._stop) or self._stop[matched] != char):
            matched = self._fail[matched - 1]
        return matched + 1 if self._stop[matched] == char else 0

    def feed(self, text: str) -> int:
        """Append text; returns the new length."""
        for char in text:
            self.length = self._next(self.length, char)
        return self.length


def stop_start(text: str, matched: str, params: SamplingParams, last_bytes: int) -> int:
    """Where the stop string, or the text a stop regex matched, begins; the text's length when it is not there.

    ``last_bytes``: bytes of the token that completed it; the regexes are searched as they were after that token.
    """
    if matched in params.stop:
        start = text.find(matched)
        return len(text) if start < 0 else start
    matches = [compile_stop_regex(pattern).search(text, last_bytes) for pattern in params.stop_regex]
    return min((m.start() for m in matches if m and m.group() == matched), default=len(text))


class IncrementalDetokenizer:
    """Text of one growing output.

    Text is held back for stop strings only: what a regex will match cannot be foreseen, so a stop regex may cut text
    that a stream has shown already.

    Args:
        hold_back: withhold a possible start of a stop string until it is decided (streams).
    """

    def __init__(self, codec: TextCodec, params: SamplingParams, hold_back: bool):
        self._codec = codec
        self._params = params
        self._trim = not params.no_stop_trim
        self._decoder = _Utf8Decoder(errors="replace")
        self._stops = [StopPrefix(stop) for stop in params.stop] if hold_back and self._trim else []
        self._text = ""
        self._shown_len = 0

    @property
    def text(self) -> str:
        """All text that may be shown so far."""
        return self._text[: self._shown_len]

    def push(self, ids: Sequence[int], finish: FinishReason | None = None) -> str:
        """Append ids, ending the output when ``finish`` is given; returns :attr:`text`.

        A matched stop token or string is cut off, unless ``no_stop_trim``.
        """
        matched = finish.matched if finish is not None and self._trim else None
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        last = finish is not None and not isinstance(matched, str)  # behind a stop string nothing is shown
        piece = self._decoder.decode(self._codec.join(ids, self._params.skip_special_tokens), final=last)
        self._text += piece
        held = max((stop.feed(piece) for stop in self._stops), default=0)
        if finish is not None:
            held = 0
            if isinstance(matched, str):
                last_bytes = len(self._codec.join(ids[-1:], self._params.skip_special_tokens))
                self._text = self._text[: stop_start(self._text, matched, self._params, last_bytes)]
        self._shown_len = len(self._text) - held
        return self.text
