"""Arithmetic scenario: story problems with one equation a step and ``#### N`` last, event chains and bare sums."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .base import TRAIN, Sample, Slots, assistant, in_split, user, with_system
from .pools import EN_ITEMS, EN_NAMES, ZH_ITEMS, ZH_NAMES

HELD_OUT_FAMILIES = frozenset({"older", "rope", "recipe", "split_bill", "zh_trees", "zh_goal"})


class Story(NamedTuple):
    """One family: number ranges, a condition on them, story, question and (lead, expression) steps."""

    key: str
    ranges: dict[str, tuple[int, int]]
    condition: str
    story: str
    question: str
    steps: tuple[tuple[str, str], ...]


@cache
def stories(zh: bool) -> tuple[Story, ...]:
    """All story families of one language; the notation is described in ``families/README.txt``."""
    found = []
    path = Path(__file__).parent / "families" / ("stories_zh.txt" if zh else "stories_en.txt")
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        key, ranges, condition, story, question, steps = (part.strip() for part in line.split("|"))
        spans = {}
        for word in ranges.split():
            name, span = word.split(":")
            low, high = span.split("..")
            spans[name] = (int(low), int(high))
        pairs = tuple(tuple(part.strip() for part in step.split(" = ", 1)) for step in steps.split(" ; "))
        found.append(Story(key, spans, condition, story, question, pairs))
    return tuple(found)


def compute(left: int, operator: str, right: int) -> int:
    """One exact integer operation; division must leave no remainder."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    quotient, remainder = divmod(left, right)
    if remainder:
        raise ValueError(f"{left} / {right} is not whole")
    return quotient


def value_of(term: str, numbers: dict[str, int]) -> int:
    """The value of a term: a number, a variable, or a product of variables such as ``q*b``."""
    result = 1
    for factor in term.split("*"):
        result *= numbers[factor] if factor in numbers else int(factor)
    return result


def equation(left: int, operator: str, right: int) -> str:
    return f"{left} {operator} {right} = {compute(left, operator, right)}"


EN_LEADS = ("{n} asks: ", "A question from {n}: ", "{n} and {n2} want to know: ", "Please help {n}: ")
ZH_LEADS = ("{n}问：", "{n}的作业题：", "{n}和{n2}想知道：", "请帮{n}算一下：")


def lead_in(slots: Slots, zh: bool) -> str:
    """Who asks, for problems without names: few numbers alone soon repeat. Held-out problems stand alone."""
    if slots.split != TRAIN or not slots.chance(0.94):
        return ""
    first, second = slots.some(ZH_NAMES if zh else EN_NAMES, 2)
    return slots.phrase(ZH_LEADS if zh else EN_LEADS).format(n=first, n2=second)


def finish(slots: Slots, family: str, question: str, steps: list[str], answer: int, zh: bool, hint: bool) -> Sample:
    """Builds the sample; with thinking on, the steps stand inside the reasoning and the answer is one line."""
    if hint:
        question += (
            slots.phrase((" 请一步一步计算。", " 请写出步骤。"))
            if zh
            else slots.phrase((" Think step by step.", " Show the steps."))
        )
    thinking = slots.chance(0.25)
    body, last = "\n".join(steps), f"#### {answer}"
    if thinking:
        turn = assistant((f"答案是{answer}。" if zh else f"The answer is {answer}.") + f"\n{last}", body)
    else:
        turn = assistant(f"{body}\n{last}")
    check = {"kind": "number", "value": answer}
    return Sample(
        "arithmetic", family, with_system(slots, [user(question), turn]), enable_thinking=thinking, check=check
    )


def story_sample(slots: Slots, zh: bool) -> Sample:
    """A story problem of one family of this split."""
    story = slots.phrase([story for story in stories(zh) if in_split(story.key, slots.split, HELD_OUT_FAMILIES)])
    while True:
        numbers = {name: slots.integer(low, high) for name, (low, high) in story.ranges.items()}
        if not story.condition or eval(story.condition, {}, dict(numbers)):
            break
    names, items = slots.some(EN_NAMES, 2), slots.some(EN_ITEMS, 2)
    zh_names, (measure, thing) = slots.some(ZH_NAMES, 2), slots.pick(ZH_ITEMS)
    words = {
        "n": names[0],
        "n2": names[1],
        "i": items[0],
        "i2": items[1],
        "zn": zh_names[0],
        "zn2": zh_names[1],
        "zm": measure,
        "zi": thing,
    }

    def fill(text: str) -> str:
        return re.sub(r"\{([^}]+)\}", lambda m: words[m[1]] if m[1] in words else str(value_of(m[1], numbers)), text)

    has_name = "{n}" in story.story or "{zn}" in story.story
    lead = "" if has_name else lead_in(slots, zh)
    question = lead + fill(story.story) + ("" if zh else " ") + fill(story.question)
    steps: list[str] = []
    for index, (lead, expression) in enumerate(story.steps):
        left, operator, right = expression.split(" ")
        a, b = value_of(left, numbers), value_of(right, numbers)
        numbers[f"r{index + 1}"] = compute(a, operator, b)
        steps.append(f"{fill(lead)}{'：' if zh else ': '}{equation(a, operator, b)}")
    return finish(slots, story.key, question, steps, numbers[f"r{len(story.steps)}"], zh, slots.chance(0.15))


EN_EVENTS = {
    "+": ("{n} gets {x} more.", "{n} buys {x} more.", "{n} finds {x} more.", "A friend brings {x} more."),
    "-": ("{n} gives away {x}.", "{n} loses {x}.", "{n} sells {x}.", "{n} uses {x}."),
    "*": ("Then the number becomes {x} times as large.", "{n} multiplies the number by {x}."),
}
ZH_EVENTS = {
    "+": ("又得到{x}{m}。", "又买了{x}{m}。", "又捡到{x}{m}。"),
    "-": ("送出{x}{m}。", "用掉{x}{m}。", "卖掉{x}{m}。"),
    "*": ("数量变成原来的{x}倍。",),
}


def chain_sample(slots: Slots, zh: bool) -> Sample:
    """A start number followed by two to four events."""
    name = slots.pick(ZH_NAMES if zh else EN_NAMES)
    measure, thing = slots.pick(ZH_ITEMS) if zh else ("", slots.pick(EN_ITEMS))
    value = slots.integer(5, 300)
    text = f"{name}有{value}{measure}{thing}。" if zh else f"{name} has {value} {thing}."
    steps = []
    for _ in range(slots.integer(2, 4)):
        operator = slots.phrase("++--*" if value < 200 else "++--" if value > 5 else "+")
        if operator == "-" and value < 4:
            operator = "+"
        x = (
            slots.integer(2, 9)
            if operator == "*"
            else slots.integer(2, 300)
            if operator == "+"
            else slots.integer(1, value - 1)
        )
        event = slots.phrase((ZH_EVENTS if zh else EN_EVENTS)[operator]).format(n=name, x=x, m=measure)
        text += event if zh else f" {event}"
        steps.append(equation(value, operator, x))
        value = compute(value, operator, x)
    text += f"现在有多少{measure}{thing}？" if zh else f" How many {thing} does {name} have now?"
    return finish(slots, "zh_chain" if zh else "chain", text, steps, value, zh, slots.chance(0.15))


EN_BARE = ("What is {e}?", "Calculate {e}.", "{e} = ?", "How much is {e}?", "Compute {e}", "{e}")
ZH_BARE = ("{e}等于多少？", "计算{e}。", "{e}=?", "请算一下{e}。")


def bare_sample(slots: Slots, zh: bool) -> Sample:
    """One plain computation: sums to four digits, products of up to two digits by one, exact quotients."""
    operator = slots.phrase("+-*/")
    if operator in "+-":
        high = slots.phrase((20, 99, 999, 4999))
        a, b = slots.integer(1, high), slots.integer(1, high)
        if operator == "-" and b > a:
            a, b = b, a
    else:
        a, b = slots.integer(2, 99), slots.integer(2, 9)
        if operator == "/":
            a *= b
    spelled = slots.phrase((operator, operator, {"*": "×", "/": "÷"}.get(operator, operator)))
    gap = slots.phrase((" ", " ", ""))
    question = lead_in(slots, zh) + slots.phrase(ZH_BARE if zh else EN_BARE).format(e=f"{a}{gap}{spelled}{gap}{b}")
    result = compute(a, operator, b)
    return finish(slots, "zh_bare" if zh else "bare", question, [equation(a, operator, b)], result, zh, False)


def compare_sample(slots: Slots, zh: bool) -> Sample:
    """Which of two numbers is larger, and by how much."""
    a, b = sorted((slots.integer(1, 4999), slots.integer(1, 4999)))
    b += a == b
    first, second = (a, b) if slots.chance(0.5) else (b, a)
    question = (
        f"{first}和{second}哪个大？大多少？" if zh else f"Which number is larger, {first} or {second}, and by how much?"
    )
    step = f"{b}更大：{equation(b, '-', a)}" if zh else f"{b} is larger: {equation(b, '-', a)}"
    return finish(slots, "zh_compare" if zh else "compare", question, [step], b - a, zh, False)


def generate(slots: Slots) -> Sample:
    """One arithmetic conversation of this split."""
    zh = slots.chance(0.34)
    if slots.split not in (TRAIN, "held_out"):
        return story_sample(slots, zh)
    draw = slots.rng.random()
    if draw < 0.6:
        return story_sample(slots, zh)
    if draw < 0.76:
        return chain_sample(slots, zh)
    return bare_sample(slots, zh) if draw < 0.95 else compare_sample(slots, zh)
