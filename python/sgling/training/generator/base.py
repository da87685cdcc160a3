"""What every scenario of the training-data generator shares: samples, slot values and the train / held-out split.

A sample is a conversation with a machine-checkable answer. Slot values (names, items, cities ...) are split by hash:
one in eight is held out, so held-out samples use words never seen in that slot during training. Whole template
families can be held out as well. On top of that, a hash of the prompt keeps train and held-out prompts disjoint.
"""

from __future__ import annotations

import builtins
import keyword
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


_ONSETS, _VOWELS, _CODAS = (
    "b c d f g h j k l m n p r s t v w z br cl dr fl gr pl st tr ch sh qu".split(),
    "a e i o u ai ea oo y".split(),
    ["", "", "n", "r", "l", "s", "t", "m", "ck", "x", "ng"],
)
_HAN = (
    "安白宝北本边冰博才采草长晨城春达大丹岛德电东冬法方飞风福刚高歌格光广海汉航豪河和恒红花华欢辉慧吉佳建江杰金京静菊军凯康可兰蓝乐雷力立丽连亮林灵龙路"
    "露绿马满美梦米民明木南宁平齐奇启千强青晴秋然荣如瑞润森山上深胜诗石书树双水思松苏天田婷通同彤万望微文武西希夏仙香向小晓心欣新星兴雄秀旭雪雅言阳叶"
    "一依亦逸音银英颖永友宇雨玉远月悦云泽展昭哲真正之知志智中州竹子紫"
)


def made_up_word(rng: random.Random) -> str:
    """A pronounceable word that is in no list, so that copying is learned for unknown words too."""
    while True:
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.randint(1, 3)))
        if len(word) > 2 and not keyword.iskeyword(word) and not hasattr(builtins, word):
            return word


def made_up_like(rng: random.Random, example: str) -> str:
    """A made-up word in the script and case of ``example``."""
    if "\u4e00" <= example[0] <= "\u9fff":
        return "".join(rng.choice(_HAN) for _ in range(rng.randint(2, 3)))
    word = made_up_word(rng)
    return word.capitalize() if example[0].isupper() else word


class OpenPool(tuple[str, ...]):
    """A slot pool that unknown words may join."""

    __slots__ = ()


class Slots:
    """Random source of one sample, which respects the split when it picks values from pools.

    Training picks from an open pool (names, words) give a made-up word now and then.
    """

    def __init__(self, rng: random.Random, split: str = TRAIN) -> None:
        self.rng = rng
        self.split = split

    def pick(self, pool: Sequence[Any]) -> Any:
        """One value of a slot pool, from this split's part of it (the whole pool where that part is empty)."""
        rng = self.rng
        want = self.split != TRAIN
        if not want and isinstance(pool, OpenPool) and rng.random() < 0.3:
            return made_up_like(rng, pool[0])
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
