"""Which stop regexes may be searched after every token, and how far back: never more than a bounded number of tries.

Python's matcher backtracks and has no time limit, and a clock would let tensor-parallel ranks disagree. So patterns are
judged by their shape, which every rank sees alike: a repeat can end in as many places as its length may vary, and
repeats that can take the same characters multiply. :mod:`regex_cost` counts that; the longest stretch of text that
keeps the count below :data:`MAX_TRIES` is what the pattern is searched in.
"""

from __future__ import annotations

import re
from re import _parser as parser
from typing import NamedTuple

from sgling.srt.sampling.regex_cost import MAX_NESTING, choices, nesting, why_not_bounded

MAX_PATTERN = 2000  # characters
WINDOWS = (4096, 1000, 500)  # characters of text a pattern may be searched in, the longest that is affordable
MAX_TRIES = 2**27  # of one search in the worst text for a pattern: 0.1 s as a rule, a second at the most
TOO_DEEP = f"groups may be nested {MAX_NESTING} deep at most"


class StopRegex(NamedTuple):
    """A compiled pattern and the number of characters before the newest token that a match may begin at."""

    pattern: re.Pattern[str]
    window: int

    def search(self, text: str, new_bytes: int) -> re.Match[str] | None:
        """The first match in ``text``, whose last token has ``new_bytes`` bytes; anchors see all of the text."""
        new_chars = new_bytes + 1  # at most: one more where the token breaks a character off
        found = self.pattern.search(text, max(0, len(text) - new_chars - self.window))
        return found if found and found.group() else None


def compile_stop_regex(pattern: str) -> StopRegex:
    """The compiled pattern; raises ``re.error`` for one that is invalid or refused, with the reason."""
    if len(pattern) > MAX_PATTERN:
        raise re.error(f"{len(pattern)} characters, at most {MAX_PATTERN} are allowed")
    try:
        tree = parser.parse(pattern)
        if nesting(tree) > MAX_NESTING:
            raise re.error(TOO_DEEP)
        return StopRegex(re.compile(pattern), _window(tree))
    except (RecursionError, OverflowError) as error:
        raise re.error(TOO_DEEP if isinstance(error, RecursionError) else str(error)) from error


def _window(tree: parser.SubPattern) -> int:
    """The longest affordable window; raises ``re.error`` when there is none."""
    reason = why_not_bounded(tree)
    if reason is not None:
        raise re.error(reason)
    shortest, longest = tree.getwidth()
    if shortest > WINDOWS[0]:
        raise re.error(f"matches at least {shortest} characters, at most {WINDOWS[0]} are searched")
    for window in WINDOWS:
        length = min(longest, window)
        if length >= shortest and window * choices(tree, window) <= MAX_TRIES:
            return length
    raise re.error("too many repeats of variable length can match the same text; bound them or make them distinct")
