"""Which stop regexes may be searched after every token: none that can take exponential time.

Python's matcher backtracks and has no time limit, and a clock would let tensor-parallel ranks disagree. So patterns are
judged by their shape, which every rank sees alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants as constants
from re import _parser as parser
from typing import Any

MANY = 64  # a repeat that may run this often counts as unbounded
_REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT)


def why_not_searchable(pattern: str) -> str | None:
    """Reason to refuse a pattern, or None.

    Refused is an unbounded repeat of a group that itself repeats or branches, like ``(a+)+`` or ``(a|aa)*``, and a
    backreference: their backtracking can double with every character.

    Raises:
        re.error: no valid pattern.
    """
    for operation, argument in _walk(parser.parse(pattern)):
        if operation is constants.GROUPREF:
            return "backreferences are not supported"
        if operation in _REPEATS and argument[1] >= MANY:
            inner = [op for op, _ in _walk(argument[2])]
            if any(op in (*_REPEATS, constants.BRANCH) for op in inner):
                return "an unbounded repeat may not contain a repeat or an alternative"
    return None


def _walk(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (operation, argument) of a parsed pattern, nested ones included."""
    for operation, argument in tree:
        yield operation, argument
        for part in _subpatterns(argument):
            yield from _walk(part)


def _subpatterns(argument: Any) -> Iterator[Any]:
    if isinstance(argument, parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _subpatterns(part)


def compile_stop_regex(pattern: str) -> re.Pattern[str]:
    """The compiled pattern; raises ``re.error`` for one that is invalid or refused."""
    reason = why_not_searchable(pattern)
    if reason is not None:
        raise re.error(reason)
    return re.compile(pattern)
