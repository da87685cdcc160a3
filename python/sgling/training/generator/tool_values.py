"""Argument and result values of the tool scenario: how a value reads in a request, and what it is in JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .base import OpenPool, Slots
from .pools import CITIES, EN_ITEMS, EN_NAMES, NOUNS, WORDS, ZH_ITEMS, ZH_NAMES

_ZH_TOPICS = """买菜 项目周会 交房租 生日聚会 看牙医 写周报 打扫房间 读书会 跑步训练
接孩子 预算讨论 产品发布 备份文件 浇花 取快递 练琴 家长会 团队午餐
检查邮件 订车票 学习英语 准备晚饭 整理照片 修自行车 面试安排 设计评审 年终总结"""
ZH_TOPICS = OpenPool(_ZH_TOPICS.split())
JSON_TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "people": "array",
    "wordlist": "array",
    "object": "object",
}


class Value(NamedTuple):
    """A value: ``spoken`` as it stands in the request, ``json`` as it stands in the call."""

    spoken: str
    json: Any


def list_text(words: list[str], zh: bool) -> str:
    """ "a, b and c" or its Chinese form."""
    if len(words) == 1:
        return words[0]
    return "、".join(words) if zh else f"{', '.join(words[:-1])} and {words[-1]}"


def _topic(slots: Slots, zh: bool) -> str:
    if zh:
        return slots.pick(ZH_TOPICS) + (slots.pick(ZH_TOPICS) if slots.chance(0.3) else "")
    return " ".join(slots.some(WORDS, slots.integer(1, 3)))


def _email(slots: Slots, zh: bool) -> str:
    name = slots.pick(EN_NAMES).lower() + slots.phrase(("", "." + slots.pick(WORDS), str(slots.integer(1, 99))))
    return f"{name}@{slots.pick(WORDS)}.{slots.phrase(('com', 'org', 'net'))}"


def _expression(slots: Slots, zh: bool) -> str:
    terms = [str(slots.integer(2, 999))]
    for _ in range(slots.integer(1, 3)):
        terms += [slots.phrase("+-*"), str(slots.integer(2, 99))]
    return " ".join(terms)


def _letters(slots: Slots, count: int) -> str:
    return "".join(slots.phrase("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(count))


def _place(slots: Slots, zh: bool) -> str:
    return f"{slots.phrase(('Cafe', 'Casa', 'Villa', 'Hotel', 'Chez', 'Park'))} {slots.pick(WORDS).capitalize()}"


def _address(slots: Slots, zh: bool) -> str:
    return f"{slots.integer(1, 250)} {slots.pick(WORDS).capitalize()} {slots.phrase(('Street', 'Road', 'Lane'))}"


ROOMS = ("kitchen", "bedroom", "bathroom", "living room", "office", "hall", "garage", "attic", "cellar", "study")
MINUTES = (0, 5, 10, 15, 20, 30, 40, 45, 50)
FILE_ENDINGS = ("txt", "md", "csv", "log", "json")
TEXT_VALUES: dict[str, Callable[[Slots, bool], str]] = {
    "city": lambda s, zh: s.pick(CITIES)[1 if zh else 0] if s.chance(0.85) else s.pick(ZH_NAMES if zh else EN_NAMES),
    "person": lambda s, zh: s.pick(ZH_NAMES if zh and s.chance(0.7) else EN_NAMES),
    "topic": _topic,
    "item": lambda s, zh: s.pick(ZH_ITEMS)[1] if zh else s.pick(EN_ITEMS),
    "date": lambda s, zh: f"{s.integer(2024, 2029)}-{s.integer(1, 12):02d}-{s.integer(1, 28):02d}",
    "time": lambda s, zh: f"{s.integer(0, 23):02d}:{s.phrase(MINUTES):02d}",
    "email": _email,
    "phone": lambda s, zh: "".join(str(s.integer(0, 9)) for _ in range(7)),
    "code": lambda s, zh: f"{_letters(s, 2)}{s.integer(100, 9999)}",
    "ticker": lambda s, zh: _letters(s, s.integer(3, 4)),
    "expression": _expression,
    "place": _place,
    "address": _address,
    "room": lambda s, zh: s.phrase(ROOMS),
    "path": lambda s, zh: f"{s.pick(WORDS)}/{s.pick(NOUNS)}.{s.phrase(FILE_ENDINGS)}",
    "folder": lambda s, zh: f"/{s.pick(WORDS)}/{s.pick(NOUNS)}",
    "noun": lambda s, zh: s.pick(NOUNS) + "s",
    "word": lambda s, zh: s.pick(WORDS),
    "host": lambda s, zh: f"{s.pick(WORDS)}-{s.integer(1, 99):02d}",
    "version": lambda s, zh: f"{s.integer(0, 9)}.{s.integer(0, 20)}.{s.integer(0, 30)}",
}
"""Kinds whose values are plain strings, spoken as they are."""


def make_value(slots: Slots, kind: str, zh: bool) -> Value:
    """One value of a kind such as ``city``, ``int:1..9`` or ``enum:a,b``."""
    name, _, detail = kind.partition(":")
    if name == "int":
        low, high = detail.split("..")
        number = slots.integer(int(low), int(high))
        return Value(str(number), number)
    if name == "float":
        amount = slots.integer(100, 30000) / 100
        return Value(str(amount), amount)
    if name == "enum":
        choice = slots.phrase(detail.split(","))
        return Value(choice, choice)
    if name == "bool":
        flag = slots.chance(0.5)
        return Value("true" if flag else "false", flag)
    if name == "people":
        names = slots.some(ZH_NAMES if zh else EN_NAMES, slots.integer(1, 3))
        return Value(list_text(names, zh), names)
    if name == "wordlist":
        words = slots.some(WORDS, slots.integer(2, 4))
        return Value(list_text(words, zh), words)
    if name == "object":
        section, row = slots.phrase("ABCDEFGH"), slots.integer(1, 40)
        return Value("", {"section": section, "row": row})
    text = TEXT_VALUES[name](slots, zh)
    return Value(text, text)


def json_schema(kind: str, description: str) -> dict[str, Any]:
    """The JSON schema of a parameter kind."""
    name, _, detail = kind.partition(":")
    schema: dict[str, Any] = {"type": JSON_TYPES.get(name, "string"), "description": description}
    if name == "enum":
        schema["enum"] = detail.split(",")
    if schema["type"] == "array":
        schema["items"] = {"type": "string"}
    return schema
