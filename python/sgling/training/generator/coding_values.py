"""Argument values of the coding scenario, by parameter kind, with the usual parameter names and type hints."""

from __future__ import annotations

from typing import Any

from .base import Slots
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


def make_value(slots: Slots, kind: str, previous: list[Any], easy: bool) -> Any:
    """A random argument of one kind; ``previous`` are the arguments before it; ``easy`` ones are short and small."""
    rng = slots.rng
    if kind == "ints":
        values = rng.sample(range(1, 21 if easy else 100), rng.randint(3, 4 if easy else 6))
        return [*values, values[0]] if slots.chance(0.2) else values
    if kind == "smallints":
        return [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]
    if kind in ("sortedints", "sortedints2"):
        return sorted(rng.sample(range(1, 60), rng.randint(3, 5)))
    if kind == "nested":
        return [[rng.randint(1, 30) for _ in range(rng.randint(1, 3))] for _ in range(3)]
    if kind == "words":
        words = slots.some(WORDS, rng.randint(3, 5))
        return [*words, words[0]] if slots.chance(0.3) else words
    if kind == "scores":
        return {word: rng.randint(1, 99) for word in slots.some(WORDS, 3)}
    if kind == "str":
        return " ".join(slots.some(WORDS, rng.randint(2, 4)))
    if kind in ("word", "lowerword"):
        return rng.choice(PALINDROMES) if kind == "word" and slots.chance(0.3) else slots.pick(WORDS)
    if kind == "word2":
        return "".join(rng.sample(previous[0], len(previous[0]))) if slots.chance(0.5) else slots.pick(WORDS)
    if kind == "letter":
        first = previous[0]
        return rng.choice(first if isinstance(first, str) else first[0]).replace(" ", "a")
    if kind == "target":
        return rng.choice(previous[0]) + (rng.choice(previous[0]) if slots.chance(0.2) else 0)
    if easy and kind in ("n", "n2", "big"):
        return rng.randint(100, 999) if kind == "big" else rng.randint(2, 20)
    spans = {
        "small": (3, 9),
        "n": (2, 60),
        "n2": (2, 60),
        "big": (100, 99999),
        "base": (2, 9),
        "exponent": (2, 5),
        "year": (1900, 2100),
    }
    return rng.randint(*spans[kind])
