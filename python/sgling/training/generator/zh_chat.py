"""Chinese chat scenario: everyday advice in list, prose or one-sentence form, one to four turns."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .base import TRAIN, Sample, Slots, assistant, in_split, user, with_system
from .pools import ZH_NAMES

HELD_OUT_FAMILIES = frozenset({"搬家", "洗衣服", "雪天", "演讲"})
NUMERALS = "零一两三四五六"


class Topic(NamedTuple):
    """A topic, the questions people ask about it, and the advice we can give."""

    name: str
    questions: tuple[str, ...]
    facts: tuple[str, ...]


@cache
def topics() -> tuple[Topic, ...]:
    """All topics of ``families/zh_topics.txt``: a head line and a line of facts each."""
    lines = (Path(__file__).parent / "families" / "zh_topics.txt").read_text(encoding="utf-8").strip().split("\n")
    found = []
    for head, facts in zip(lines[::2], lines[1::2], strict=True):
        name, *questions = head.split("|")
        found.append(Topic(name, tuple(questions), tuple(facts.split("|"))))
    return tuple(found)


LIST_ASKS = ("请列出{k}点。", "给我{k}条建议。", "说{k}点就好。", "请用{k}点回答。")
ONE_ASKS = ("用一句话回答。", "一句话就好。", "请简单说一句。")
OPENERS = (
    "关于{t}，可以试试下面几点：",
    "好的，关于{t}的建议如下：",
    "关于{t}，下面几点比较实用：",
    "可以从这几方面入手：",
)
CLOSERS = ("希望对你有帮助。", "慢慢来，不用着急。", "先从最容易的一点开始。", "坚持一段时间就会有变化。", "祝你顺利！")
PROSE_OPENERS = ("可以试试这样做：", "我的建议是：", "其实不难，", "关于{t}，")
JOINS = (("首先，", "其次，", "另外，", "最后，"), ("先说一点，", "同时，", "还有，", "最后，"))
NAME_OPENERS = ("我是{n}，", "我叫{n}，", "{n}想知道：", "帮{n}问一下，")
"""Few facts alone soon repeat; held-out questions stand alone."""
REASONS = (
    "因为{f}，这样更容易坚持，也更有效果。",
    "因为小的改变更容易做到，{f}就是一个好的开始。",
    "很多人的经验是，{f}以后情况会好很多。",
)


def list_answer(slots: Slots, topic: Topic, facts: list[str]) -> str:
    lines = [slots.phrase(OPENERS).format(t=topic.name)]
    lines += [f"{index + 1}. {fact}。" for index, fact in enumerate(facts)]
    return "\n".join([*lines, slots.phrase(CLOSERS)])


def prose_answer(slots: Slots, topic: Topic, facts: list[str]) -> str:
    joins = slots.phrase(JOINS)
    words = [joins[0]] + list(joins[1 : len(facts) - 1]) + ([joins[3]] if len(facts) > 1 else [])
    body = "".join(f"{word}{fact}。" for word, fact in zip(words, facts, strict=True))
    return slots.phrase(PROSE_OPENERS).format(t=topic.name) + body + slots.phrase(CLOSERS)


def first_turn(slots: Slots, topic: Topic, thinking: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """The first question and answer, and the facts used."""
    question = slots.phrase(topic.questions)
    if slots.chance(0.25):
        question = slots.phrase(("你好，", "请问，", "想问一下，", "老师您好，")) + question
    elif slots.split == TRAIN and slots.chance(0.8):
        question = slots.phrase(NAME_OPENERS).format(n=slots.pick(ZH_NAMES)) + question
    if slots.chance(0.15):
        question = question.rstrip("？。")
    style = slots.phrase(("list", "list", "prose", "prose", "one"))
    count = slots.integer(2, 5) if style == "list" else slots.integer(2, 4) if style == "prose" else 1
    facts = slots.rng.sample(topic.facts, count)
    if style == "list":
        question += slots.phrase(LIST_ASKS).format(k=slots.phrase((NUMERALS[count], str(count))))
        answer = list_answer(slots, topic, facts)
    elif style == "prose":
        answer = prose_answer(slots, topic, facts)
    else:
        question += slots.phrase(ONE_ASKS)
        answer = f"{facts[0]}。"
    reasoning = (
        f"用户在问{topic.name}。{f'需要列出{count}点。' if style == 'list' else '用简单的话回答。'}" if thinking else ""
    )
    return [user(question), assistant(answer, reasoning)], facts


def follow_up(slots: Slots, topic: Topic, used: list[str]) -> list[dict[str, Any]]:
    """Another turn: more advice, a reason, thanks, or a choice between two pieces of advice."""
    left = [fact for fact in topic.facts if fact not in used]
    kind = slots.phrase(("more", "why", "thanks", "choice", "repeat"))
    if kind == "more" and left:
        fact = slots.phrase(left)
        used.append(fact)
        return [user(slots.phrase(("还有吗？", "还有别的建议吗？", "再说一点。"))), assistant(f"还可以这样：{fact}。")]
    if kind == "why":
        fact = slots.phrase(used)
        return [
            user(f"为什么要{fact}？" if slots.chance(0.5) else f"“{fact}”有用吗？"),
            assistant(slots.phrase(REASONS).format(f=fact)),
        ]
    if kind == "choice" and len(left) > 1:
        first, second = slots.rng.sample(left, 2)
        pick = first if slots.chance(0.5) else second
        used += [first, second]
        return [user(f"{first}和{second}，哪个更容易？"), assistant(f"我觉得{pick}更容易一些，可以先试试。")]
    if kind == "repeat":
        return [
            user(slots.phrase(("第一点再说一遍。", "你刚才说的第一点是什么？"))),
            assistant(f"第一点是：{used[0]}。"),
        ]
    return [
        user(slots.phrase(("谢谢！", "谢谢你。", "好的，明白了。", "太好了，谢谢。"))),
        assistant(slots.phrase(("不客气！", "不用谢，祝你一切顺利。", "不客气，有问题再问我。"))),
    ]


def generate(slots: Slots) -> Sample:
    """One Chinese conversation of this split."""
    topic = slots.phrase([topic for topic in topics() if in_split(topic.name, slots.split, HELD_OUT_FAMILIES)])
    thinking = slots.chance(0.15)
    messages, used = first_turn(slots, topic, thinking)
    if slots.split == TRAIN and not thinking:
        for _ in range(slots.phrase((0, 0, 0, 1, 1, 2, 3))):
            messages += follow_up(slots, topic, used)
        if slots.chance(0.12):
            other = slots.phrase([t for t in topics() if in_split(t.name, TRAIN, HELD_OUT_FAMILIES)])
            messages += first_turn(slots, other, False)[0]
    return Sample("zh_chat", topic.name, with_system(slots, messages), enable_thinking=thinking, check={"kind": "zh"})
