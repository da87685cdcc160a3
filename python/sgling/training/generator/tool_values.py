"""Argument and result values of the tool scenario: how a value reads in a request, and what it is in JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

from .base import Slots
from .pools import CITIES, EN_ITEMS, EN_NAMES, NOUNS, WORDS, ZH_ITEMS, ZH_NAMES

ZH_TOPICS = (
    "买菜",
    "项目周会",
    "交房租",
    "生日聚会",
    "看牙医",
    "写周报",
    "打扫房间",
    "读书会",
    "跑步训练",
    "接孩子",
    "预算讨论",
    "产品发布",
    "备份文件",
    "浇花",
    "取快递",
    "练琴",
    "家长会",
    "团队午餐",
    "检查邮件",
    "订车票",
    "学习英语",
    "准备晚饭",
    "整理照片",
    "修自行车",
    "面试安排",
    "设计评审",
    "年终总结",
)
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


def text_value(slots: Slots, kind: str, zh: bool) -> str:
    """Values that are plain strings, spoken as they are."""
    digits = slots.integer
    if kind == "city":
        return slots.pick(CITIES)[1 if zh else 0]
    if kind == "person":
        return slots.pick(ZH_NAMES if zh and slots.chance(0.7) else EN_NAMES)
    if kind == "topic":
        return (
            slots.pick(ZH_TOPICS) + (slots.pick(ZH_TOPICS) if slots.chance(0.3) else "")
            if zh
            else " ".join(slots.some(WORDS, digits(1, 3)))
        )
    if kind == "item":
        return slots.pick(ZH_ITEMS)[1] if zh else slots.pick(EN_ITEMS)
    if kind == "date":
        return f"{digits(2024, 2029)}-{digits(1, 12):02d}-{digits(1, 28):02d}"
    if kind == "time":
        return f"{digits(0, 23):02d}:{slots.phrase((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"
    if kind == "email":
        return f"{slots.pick(EN_NAMES).lower()}{slots.phrase(('', '.' + slots.pick(WORDS), str(digits(1, 99))))}@{slots.pick(WORDS)}.{slots.phrase(('com', 'org', 'net'))}"
    if kind == "phone":
        return "".join(str(digits(0, 9)) for _ in range(7))
    if kind == "code":
        letters = "".join(slots.phrase("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(2))
        return f"{letters}{digits(100, 9999)}"
    if kind == "ticker":
        return "".join(slots.phrase("ABCDEFGHIJKLMNOPRSTUVWXYZ") for _ in range(digits(3, 4)))
    if kind == "expression":
        terms = [str(digits(2, 999))]
        for _ in range(digits(1, 3)):
            terms += [slots.phrase("+-*"), str(digits(2, 99))]
        return " ".join(terms)
    if kind == "place":
        return f"{slots.phrase(('Cafe', 'Casa', 'Villa', 'Hotel', 'Chez', 'Park'))} {slots.pick(WORDS).capitalize()}"
    if kind == "address":
        return f"{digits(1, 250)} {slots.pick(WORDS).capitalize()} {slots.phrase(('Street', 'Road', 'Lane'))}"
    if kind == "room":
        return slots.phrase(
            ("kitchen", "bedroom", "bathroom", "living room", "office", "hall", "garage", "attic", "cellar", "study")
        )
    if kind == "path":
        return f"{slots.pick(WORDS)}/{slots.pick(NOUNS)}.{slots.phrase(('txt', 'md', 'csv', 'log', 'json'))}"
    if kind == "folder":
        return f"/{slots.pick(WORDS)}/{slots.pick(NOUNS)}"
    if kind == "noun":
        return slots.pick(NOUNS) + "s"
    if kind == "word":
        return slots.pick(WORDS)
    if kind == "host":
        return f"{slots.pick(WORDS)}-{digits(1, 99):02d}"
    if kind == "version":
        return f"{digits(0, 9)}.{digits(0, 20)}.{digits(0, 30)}"
    raise ValueError(f"unknown value kind {kind}")


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
    text = text_value(slots, name, zh)
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
