"""Argument values of the coding scenario, by parameter kind, with the usual parameter names and type hints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .base import Slots, is_held_out_value
from .pools import WORDS

KIND_NAMES = {
    "ints": "numbers values nums items data",
    "smallints": "numbers factors values",
    "sortedints": "numbers sorted_list values",
    "sortedints2": "other second more",
    "nested": "lists rows matrix groups",
    "words": "words names texts labels",
    "scores": "scores points counts prices",
    "str": "text sentence line phrase",
    "word": "word text name",
    "word2": "other second",
    "lowerword": "word text name",
    "letter": "letter char",
    "target": "target goal wanted",
    "small": "n number count",
    "n": "n number value",
    "n2": "m other second",
    "big": "n number value",
    "base": "base number",
    "exponent": "exponent times",
    "year": "year",
}
KIND_HINTS = {
    "ints": "list[int]",
    "smallints": "list[int]",
    "sortedints": "list[int]",
    "sortedints2": "list[int]",
    "nested": "list[list[int]]",
    "words": "list[str]",
    "scores": "dict[str, int]",
    "str": "str",
    "word": "str",
    "word2": "str",
    "lowerword": "str",
    "letter": "str",
}
PALINDROMES = ("level", "radar", "civic", "noon", "refer", "kayak", "rotor")


_EXAMPLE_WORDS = """cat dog sun sky map pen cup key bus hat egg tree book fish bird rain blue door lamp milk rose sand
wind apple bread chair clock green house lemon money paper moon river stone table train water"""
EXAMPLE_WORDS = tuple(word for word in _EXAMPLE_WORDS.split() if not is_held_out_value(word))
"""Plain words for examples the model picks itself; the same in every split."""


class Level(NamedTuple):
    """How hard arguments are: largest list element, most list elements, most words, whether plain numbers are small.

    ``own_words``: words of the split's pool; else a few plain words which every split shares.
    """

    top: int
    length: int
    words: int
    small: bool
    own_words: bool


TINY = Level(9, 3, 2, True, own_words=False)
"""Arguments the model picks itself."""
EASY = Level(20, 4, 3, True, own_words=True)
"""Arguments a request names, whose result the answer states."""
HARD = Level(99, 6, 5, False, own_words=True)
"""Arguments only the interpreter evaluates."""


def _pick_words(slots: Slots, level: Level, count: int) -> list[str]:
    return slots.some(WORDS, count) if level.own_words else slots.rng.sample(EXAMPLE_WORDS, count)


def _numbers(slots: Slots, level: Level) -> list[int]:
    values = slots.rng.sample(range(1, level.top + 1), slots.rng.randint(3, level.length))
    return [*values, values[0]] if slots.chance(0.2) else values


def _sorted_numbers(slots: Slots, level: Level) -> list[int]:
    return sorted(slots.rng.sample(range(1, level.top + 1), slots.rng.randint(3, max(3, level.length - 1))))


def _factors(slots: Slots, level: Level) -> list[int]:
    return [slots.integer(1, min(level.top, 9)) for _ in range(slots.integer(2, max(2, level.length - 2)))]


def _nested(slots: Slots, level: Level) -> list[list[int]]:
    return [[slots.integer(1, level.top) for _ in range(slots.integer(1, 3))] for _ in range(slots.integer(2, 3))]


def _word_list(slots: Slots, level: Level) -> list[str]:
    words = _pick_words(slots, level, slots.integer(3, max(3, level.words)))
    return [*words, words[0]] if slots.chance(0.3) else words


def _scores(slots: Slots, level: Level) -> dict[str, int]:
    return {word: slots.integer(1, level.top) for word in _pick_words(slots, level, 3)}


def _word(slots: Slots, level: Level) -> str:
    return _pick_words(slots, level, 1)[0]


def _word_or_palindrome(slots: Slots, level: Level) -> str:
    return slots.phrase(PALINDROMES) if slots.chance(0.3) else _word(slots, level)


FREE_VALUES: dict[str, Callable[[Slots, Level], Any]] = {
    "ints": _numbers,
    "smallints": _factors,
    "sortedints": _sorted_numbers,
    "sortedints2": _sorted_numbers,
    "nested": _nested,
    "words": _word_list,
    "scores": _scores,
    "str": lambda slots, level: " ".join(_pick_words(slots, level, slots.integer(2, max(2, level.words - 1)))),
    "word": _word_or_palindrome,
    "lowerword": _word,
}
"""Kinds whose values do not depend on earlier arguments."""
SPANS = {
    "small": (3, 9),
    "n": (2, 60),
    "n2": (2, 60),
    "big": (100, 99999),
    "base": (2, 9),
    "exponent": (2, 5),
    "year": (1900, 2100),
}
SMALL_SPANS = SPANS | {"n": (2, 20), "n2": (2, 20), "big": (100, 999), "exponent": (2, 3)}


def make_value(slots: Slots, kind: str, previous: list[Any], level: Level) -> Any:
    """A random argument of one kind; ``previous`` are the arguments before it."""
    rng = slots.rng
    if kind in FREE_VALUES:
        return FREE_VALUES[kind](slots, level)
    if kind == "word2":
        return "".join(rng.sample(previous[0], len(previous[0]))) if slots.chance(0.5) else _word(slots, level)
    if kind == "letter":
        first = previous[0]
        return rng.choice(first if isinstance(first, str) else first[0]).replace(" ", "a")
    if kind == "target":
        return rng.choice(previous[0]) + (rng.choice(previous[0]) if slots.chance(0.2) else 0)
    return rng.randint(*(SMALL_SPANS if level.small else SPANS)[kind])
