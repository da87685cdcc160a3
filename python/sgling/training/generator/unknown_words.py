"""Words that stand in no slot pool, for training only, so that copying is learned for words never seen before.

English ones are ordinary words, those with an ending, two halves of them, or made-up syllables; Chinese ones are any
frequent characters. Together they show every piece of a word to copy. The caller leaves out what its split holds out.
"""

from __future__ import annotations

import builtins
import keyword
import random
from functools import cache
from pathlib import Path

_ONSETS = (
    "b c d f g h j k l m n p r s t v w y z bl br ch cl cr dr fl fr gl gr kn ph pl pr qu sc sh sk sl sm sn sp st sw th "
    "tr tw wh str"
).split()
_VOWELS = "a e i o u a e i o u ai au ea ee ie io oa oi oo ou ow y".split()
_CODAS = [
    "",
    "",
    "",
    *"b ck d ft g ght k l ld ll lt m mp n nd ng nk nt p r rd rk rn rt s sh sk ss st t th tz v x z".split(),
]
_ENDINGS = ("", "", "", "", "e", "er", "le", "ing", "ed", "s", "y", "ow", "ar", "en", "in")
_SUFFIXES = ("s", "er", "ly", "ish", "ed", "ing", "y", "ness", "like")
_NUMERALS = "一二三四五六七八九十百千万亿零两"


@cache
def _words() -> tuple[str, ...]:
    return tuple((Path(__file__).parent / "families" / "words.txt").read_text(encoding="utf-8").split())


@cache
def _han() -> str:
    """The 3,755 characters of GB2312 level 1, numerals left out."""
    codes = (bytes((row, cell)) for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF))
    text = "".join(code.decode("gb2312", errors="ignore") for code in codes)
    return "".join(char for char in text if char not in _NUMERALS)


def _syllables(rng: random.Random) -> str:
    count = rng.choice((1, 1, 1, 2, 2, 3))
    parts = (rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))
    return "".join(parts) + rng.choice(_ENDINGS)


def _halves(rng: random.Random) -> str:
    first, second = rng.choice(_words()), rng.choice(_words())
    return first[: (len(first) + 1) // 2 + rng.randint(0, 1)] + second[len(second) // 2 :]


def _ordinary(rng: random.Random) -> str:
    return rng.choice(_words())


def _derived(rng: random.Random) -> str:
    return rng.choice(_words()) + rng.choice(_SUFFIXES)


def unknown_word(rng: random.Random) -> str:
    """A lower-case English-looking word of 3 to 12 letters, neither a keyword nor a builtin of Python."""
    while True:
        word = rng.choice((_syllables, _halves, _ordinary, _derived))(rng)
        if 2 < len(word) < 13 and not keyword.iskeyword(word) and not hasattr(builtins, word):
            return word


def unknown_like(rng: random.Random, example: str) -> str:
    """An unknown word in the script and case of ``example``; Chinese ones have two to four characters."""
    if "\u4e00" <= example[0] <= "\u9fff":
        return "".join(rng.choice(_han()) for _ in range(rng.choice((2, 2, 3, 3, 4))))
    word = unknown_word(rng)
    return word.capitalize() if example[0].isupper() else word
