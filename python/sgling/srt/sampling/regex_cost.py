"""How many ways a regex can match from one start: the count by which backtracking is bounded.

A *choice* is a place where the matcher may go on in several ways: a repeat of variable length, an alternative. Two
choices multiply only if some character can belong to both; otherwise the text itself decides between them. What a
choice can consume is found out on an alphabet of representatives: ASCII, letters and digits of other scripts, and
every character and range border that the pattern names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf, prod
from re import _constants as constants
from re import _parser as parser
from typing import Any, NamedTuple

MANY = 64  # a repeat that may run this often counts as unbounded
MAX_NESTING = 30
_ALPHABET = frozenset(map(chr, range(128))) | frozenset("éßÄΩж中日한٣७\u00a0\u2028\u3000\U0001f600\ue000")
_REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT)
_CATEGORIES = {
    constants.CATEGORY_DIGIT: r"\d",
    constants.CATEGORY_NOT_DIGIT: r"\D",
    constants.CATEGORY_SPACE: r"\s",
    constants.CATEGORY_NOT_SPACE: r"\S",
    constants.CATEGORY_WORD: r"\w",
    constants.CATEGORY_NOT_WORD: r"\W",
}


class Choice(NamedTuple):
    """One place with several ways to go on: the characters it may consume, and the number of ways."""

    chars: frozenset[str]
    ways: float


def why_not_bounded(tree: parser.SubPattern) -> str | None:
    """Reason to refuse a pattern whose matching no count bounds, or None.

    Refused is an unbounded repeat of a group that itself repeats or branches, like ``(a+)+`` or ``(a|aa)*``, and a
    backreference: their backtracking can double with every character.
    """
    for operation, argument in _walk(tree):
        if operation in (constants.GROUPREF, constants.GROUPREF_EXISTS):
            return "backreferences are not supported"
        if operation in _REPEATS and argument[1] >= MANY:
            inner = [op for op, _ in _walk(argument[2])]
            if any(op in (*_REPEATS, constants.BRANCH) for op in inner):
                return "an unbounded repeat may not contain a repeat or an alternative"
    return None


def nesting(tree: parser.SubPattern) -> int:
    """Depth of the deepest group."""
    deepest, level = 0, [tree]
    while level:
        level = [part for pattern in level for _, argument in pattern for part in _subpatterns(argument)]
        deepest += 1
    return deepest - 1


def choices(tree: parser.SubPattern, window: int) -> float:
    """Upper bound of the ways to match from one start in ``window`` characters of any text; may be infinite."""
    return _ways(list(_choices(tree, _ALPHABET | _named(tree), window)))


def _ways(found: list[Choice]) -> float:
    """Product of the choices that can be made over the same character, for the worst character."""
    most = 1.0
    for one in found:
        most = max(most, prod(other.ways for other in found if one.chars & other.chars))
    return most


def _choices(tree: parser.SubPattern, alphabet: frozenset[str], window: int) -> Iterator[Choice]:
    """Every choice of a pattern; a repeat with what is inside it, and a branch with its arms, are one."""
    for operation, argument in tree:
        if operation in _REPEATS:
            least, most, body = argument
            rounds = min(int(most), window)
            ways = (rounds - min(least, rounds) + 1) * _ways_of_rounds(body, alphabet, window, rounds)
            if ways > 1:
                yield Choice(_consumed(body, alphabet), ways)
        elif operation is constants.BRANCH:
            arms = argument[1]
            ways = sum(_ways(list(_choices(arm, alphabet, window))) for arm in arms)
            yield Choice(frozenset().union(*(_consumed(arm, alphabet) for arm in arms)), ways)
        else:
            for part in _subpatterns(argument):
                yield from _choices(part, alphabet, window)


def _ways_of_rounds(body: parser.SubPattern, alphabet: frozenset[str], window: int, rounds: int) -> float:
    r"""Ways inside the rounds of a repeat. A choice counts once, not in every round, when each round also holds a
    character that the choice cannot take: ``(\d+,)``.
    """
    separators = [
        _matched(operation, argument, alphabet)
        for operation, argument in _ungrouped(body)
        if operation in (constants.LITERAL, constants.NOT_LITERAL, constants.IN)
    ]
    ways = 1.0
    for choice in _choices(body, alphabet, window):
        divided = any(not choice.chars & separator for separator in separators)
        ways *= choice.ways if divided else _power(choice.ways, rounds)
    return ways


def _ungrouped(tree: parser.SubPattern) -> Iterator[tuple[Any, Any]]:
    """The elements that every match goes through, groups opened."""
    for operation, argument in tree:
        if operation is constants.SUBPATTERN:
            yield from _ungrouped(argument[-1])
        else:
            yield operation, argument


def _power(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except OverflowError:
        return inf


def _consumed(tree: parser.SubPattern, alphabet: frozenset[str]) -> frozenset[str]:
    """Characters of the alphabet that a pattern may consume."""
    found: frozenset[str] = frozenset()
    for operation, argument in tree:
        if operation in (constants.LITERAL, constants.NOT_LITERAL, constants.IN, constants.ANY):
            found |= _matched(operation, argument, alphabet)
        for part in _subpatterns(argument):
            found |= _consumed(part, alphabet)
    return found


def _matched(operation: Any, argument: Any, alphabet: frozenset[str]) -> frozenset[str]:
    """Characters that one element matches; upper and lower case are not told apart (a pattern may ignore case)."""
    if operation is constants.ANY:
        return alphabet
    if operation is constants.LITERAL:
        return frozenset({chr(argument).lower(), chr(argument).upper()})
    if operation is constants.NOT_LITERAL:
        return alphabet - {chr(argument)}
    negated = argument[0][0] is constants.NEGATE
    found: frozenset[str] = frozenset()
    for kind, value in argument[negated:]:
        if kind is constants.CATEGORY:
            found |= {char for char in alphabet if re.fullmatch(_CATEGORIES[value], char)}
        else:
            low, high = value if kind is constants.RANGE else (value, value)
            found |= {char for char in alphabet if low <= ord(char) <= high}
    return alphabet - found if negated else found | {c for char in found for c in (char.lower(), char.upper())}


def _named(tree: parser.SubPattern) -> frozenset[str]:
    """Characters and range borders that a pattern names, in both cases."""
    codes: list[int] = []
    for operation, argument in _walk(tree):
        entries = argument if operation is constants.IN else [(operation, argument)]
        for kind, value in entries:
            if kind in (constants.LITERAL, constants.NOT_LITERAL):
                codes.append(value)
            elif kind is constants.RANGE:
                codes += value
    return frozenset(case for char in map(chr, codes) for case in (char, char.lower(), char.upper()))


def _walk(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (operation, argument) of a parsed pattern, nested ones included."""
    for operation, argument in tree:
        yield operation, argument
        for part in _subpatterns(argument):
            yield from _walk(part)


def _subpatterns(argument: Any) -> Iterator[parser.SubPattern]:
    if isinstance(argument, parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _subpatterns(part)
