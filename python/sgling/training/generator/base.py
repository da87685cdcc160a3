"""What every scenario of the training-data generator shares: samples, slot values and the train / held-out split.

A sample is a conversation with a machine-checkable answer. Slot values (names, items, cities ...) are split by hash:
one in eight is held out, so held-out samples use words never seen in that slot during training. Whole template
families can be held out as well. On top of that, a hash of the prompt keeps train and held-out prompts disjoint.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .unknown_words import unknown_like

TRAIN, HELD_OUT, NEW_FAMILY = "train", "held_out", "new_family"
"""Splits: training; unseen prompts made of held-out slot values; families never trained on."""


class Sample(NamedTuple):
    """One conversation. ``check`` says how its first answer is judged; see ``checks.py``."""

    scenario: str
    family: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool = False
    check: dict[str, Any] | None = None


def stable_hash(text: str) -> int:
    """A 32-bit hash that is the same on every machine and run (Python's own ``hash`` is salted)."""
    return zlib.crc32(text.encode("utf-8")) & 0xFFFFFFFF


def is_held_out_value(value: object) -> bool:
    """One slot value in eight never occurs in training."""
    return stable_hash(f"slot:{value}") % 8 == 0


def is_held_out_prompt(prompt: str) -> bool:
    """One prompt in 32 is discarded from training; held-out samples come from those only."""
    return stable_hash(f"prompt:{prompt}") % 32 == 0


UNKNOWN_SHARE = 0.5
"""Share of the picks from an open pool that training takes from outside the pool."""


def unknown_value(rng: random.Random, example: Any) -> Any:
    """A value like ``example`` from outside the pools, held out in no form that requests or code give it.

    Of a tuple (two languages, measure word and thing) every part is replaced that is longer than one character.
    """
    if isinstance(example, tuple):
        return tuple(part if len(part) == 1 else unknown_value(rng, part) for part in example)
    while True:
        word = unknown_like(rng, example)
        if not any(is_held_out_value(form) for form in (word, word.lower(), word.capitalize())):
            return word


class OpenPool(tuple[Any, ...]):
    """A slot pool that unknown words may join, of strings or of tuples of strings."""

    __slots__ = ()


class Slots:
    """Random source of one sample, which respects the split when it picks values from pools.

    Training picks from an open pool (names, words, places) give a word from outside it now and then.
    """

    def __init__(self, rng: random.Random, split: str = TRAIN) -> None:
        self.rng = rng
        self.split = split

    def pick(self, pool: Sequence[Any]) -> Any:
        """One value of a slot pool, from this split's part of it (the whole pool where that part is empty)."""
        rng = self.rng
        want = self.split != TRAIN
        if not want and isinstance(pool, OpenPool) and rng.random() < UNKNOWN_SHARE:
            return unknown_value(rng, rng.choice(pool))
        for _ in range(24):
            value = pool[int(rng.random() * len(pool))]
            if is_held_out_value(value) == want:
                return value
        return pool[int(rng.random() * len(pool))]

    def some(self, pool: Sequence[Any], count: int) -> list[Any]:
        """``count`` different values of a slot pool."""
        chosen: list[Any] = []
        for _ in range(40 * count):
            if len(chosen) == count:
                return chosen
            value = self.pick(pool)
            if value not in chosen:
                chosen.append(value)
        rest = [value for value in pool if value not in chosen]
        self.rng.shuffle(rest)
        return (chosen + rest)[:count]

    def phrase(self, options: Sequence[Any]) -> Any:
        """One of several wordings; wordings are shared by all splits."""
        return options[int(self.rng.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)


def in_split(family: str, split: str, held_out_families: frozenset[str]) -> bool:
    """Whether a template family may be used in a split."""
    return (family in held_out_families) == (split == NEW_FAMILY)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "", tool_calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """An assistant turn; ``tool_calls`` are ``{"name", "arguments"}`` objects, wrapped here in the OpenAI form."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in tool_calls]
    return message


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are ling3-pico, a small demo model.",
    "Answer briefly.",
    "Be concise and exact.",
    "You are a friendly assistant.",
    "You are a coding and writing assistant.",
    "你是一个乐于助人的助手。",
    "请用简洁的语言回答。",
)


def with_system(slots: Slots, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts a short system prompt in front of a quarter of the conversations."""
    if slots.chance(0.25):
        return [{"role": "system", "content": slots.phrase(SYSTEM_PROMPTS)}, *messages]
    return messages


Generator = Callable[[Slots], Sample]
