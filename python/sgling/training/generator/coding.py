"""Coding scenario: small Python functions and classes, every body executed so that examples and asserts are true."""

from __future__ import annotations

import builtins
import contextlib
import io
import keyword
import re
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from .base import TRAIN, Sample, Slots, assistant, in_split, user, with_system
from .coding_classes import CLASS_FAMILIES
from .coding_values import EASY, HARD, KIND_HINTS, KIND_NAMES, TINY, Level, make_value
from .pools import NOUNS, VERBS, WORDS

HELD_OUT_FAMILIES = frozenset(
    {"count_less", "shift_all", "word_lengths", "distance", "filter_odd", "first_items", "rectangle"}
)


class Family(NamedTuple):
    """One function family. ``kinds`` are the parameter kinds, ``constants`` ranges of $k and $m."""

    key: str
    kinds: tuple[str, ...]
    constants: dict[str, tuple[int, int]]
    hint: str
    names: tuple[str, ...]
    text: dict[str, str]
    bodies: dict[str, str]


class Wishes(NamedTuple):
    """What a request asks for beside the function: type hints, a docstring, its own example arguments."""

    hints: bool
    docstring: bool
    own_args: bool


class Draft(NamedTuple):
    """One concrete function: its source, how requests and answers name it, and its executed example."""

    family: Family
    name: str
    params: tuple[str, ...]
    source: str
    style: str
    words: dict[str, str]
    args: tuple[Any, ...]
    result: Any


def parse_family(block: str) -> Family:
    """Reads one ``@`` block of the notation described in ``families/README.txt``."""
    lines = block.strip("\n").split("\n")
    key, params, hint = (part.strip() for part in lines[0].split("|", 2))
    kinds, constants = [], {}
    for word in params.split():
        name, _, span = word.partition(":")
        if span:
            low, high = span.split("..")
            constants[name] = (int(low), int(high))
        else:
            kinds.append(name)
    text: dict[str, str] = {}
    bodies: dict[str, str] = {}
    current = ""
    for line in lines[1:]:
        match = re.match(r"(names|en|zh|why|whyzh): (.*)$", line)
        if match:
            text[match[1]] = match[2]
        elif line in ("loop:", "short:"):
            current = line[:-1]
            bodies[current] = ""
        else:
            bodies[current] += "    " + line + "\n"
    return Family(key, tuple(kinds), constants, hint, tuple(text["names"].split()), text, bodies)


@cache
def families() -> tuple[Family, ...]:
    """All function families, in file order."""
    folder = Path(__file__).parent / "families"
    found = []
    for name in ("lists.txt", "values.txt"):
        blocks = folder.joinpath(name).read_text(encoding="utf-8").split("@ ")[1:]
        found += [parse_family(block) for block in blocks]
    return tuple(found)


def code_name(slots: Slots, family: Family) -> str:
    """A function name: the family's own or one a user may choose; never a builtin, parameter or local variable.

    Training chooses the family's own less often, since these are learned by heart and need no copying.
    """
    if slots.chance(0.3 if slots.split == TRAIN else 0.45):
        return slots.phrase(family.names)
    while (name := free_name(slots)) in taken_names():
        pass
    return name


@cache
def taken_names() -> frozenset[str]:
    """Names a function may not have: keywords, builtins, parameter names, every word of a template's code or docstring.

    A renamed function changes all its occurrences, so these must be its own.
    """
    filled = " ".join(("result number item", *KIND_NAMES.values()))
    templates = " ".join(text for family in families() for text in (family.text["en"], *family.bodies.values()))
    return frozenset(re.findall(r"[a-z_]+", f"{filled} {templates}")).union(keyword.kwlist, dir(builtins))


def free_name(slots: Slots) -> str:
    """Any name a user may choose: verb and nouns in snake case, sometimes camel case, one word or a number behind."""
    words = [slots.pick(VERBS), *(slots.pick(slots.phrase((NOUNS, WORDS))) for _ in range(slots.phrase((1, 1, 2))))]
    style = slots.rng.random()
    if style < 0.1:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    if style < 0.2:
        return slots.phrase((words[1], f"{words[0]}_{slots.integer(1, 99)}", f"my_{words[1]}"))
    return "_".join(words)


def run_source(source: str, expression: str) -> Any:
    """Executes generated code and evaluates one expression in it."""
    space: dict[str, Any] = {}
    exec(compile(source, "<generated>", "exec"), space)  # our own templates, never outside text
    return eval(expression, space)


def call_text(name: str, args: tuple[Any, ...]) -> str:
    return f"{name}({', '.join(repr(arg) for arg in args)})"


def fresh_args(slots: Slots, family: Family, level: Level) -> tuple[Any, ...]:
    """One argument per parameter. Arguments of stated results are easy, so that a small model can get them right.

    A family that compares with a large constant keeps large numbers: comparing them is no harder.
    """
    if any(high > EASY.top for _, high in family.constants.values()):
        level = level._replace(top=HARD.top)
    args: list[Any] = []
    for kind in family.kinds:
        args.append(make_value(slots, kind, args, level))
    return tuple(args)


def make_draft(slots: Slots, family: Family, wishes: Wishes, style: str) -> Draft:
    """Fills one family's template and runs it."""
    name = code_name(slots, family)
    params: list[str] = []
    for kind in family.kinds:
        options = [word for word in KIND_NAMES[kind].split() if word not in params]
        params.append(slots.phrase(options))
    constants = {key: str(slots.integer(low, high)) for key, (low, high) in family.constants.items()}
    item = "number" if family.kinds[0] in ("ints", "smallints", "nested") else "item"
    words = {"f": name, "a": params[0], "b": params[-1], "r": "result", "i": item, **constants}
    body = Template(family.bodies[style]).substitute(words)
    signature = ", ".join(
        f"{param}: {KIND_HINTS.get(kind, 'int')}" if wishes.hints else param
        for param, kind in zip(params, family.kinds, strict=True)
    )
    doc = Template(family.text["en"]).substitute(words)
    first = f"def {name}({signature}){' -> ' + family.hint if wishes.hints else ''}:\n"
    source = first + (f'    """{doc[0].upper() + doc[1:]}."""\n' if wishes.docstring else "") + body.rstrip("\n")
    args = fresh_args(slots, family, EASY if wishes.own_args else TINY)
    return Draft(family, name, tuple(params), source, style, words, args, run_source(source, call_text(name, args)))


EN_REQUESTS = (
    "Write a Python function that {d}.",
    "Write a function in Python that {d}.",
    "I need a Python function that {d}.",
    "Can you write a Python function that {d}?",
    "Please give me a function that {d}.",
    "Python: a function that {d}.",
    "Write a Python function to {t}.",
    "How do I {t} in Python?",
    "Write a function to {t}.",
    "Write Python code to {t}.",
)
EN_NAMED = (
    "Write a Python function `{f}` that {d}.",
    "Write a function called {f} that {d}.",
    "Please write `{f}`, a function that {d}.",
    "I need a function named {f} that {d}.",
)
ZH_REQUESTS = (
    "写一个Python函数，{d}。",
    "请写一个函数，{d}。",
    "帮我用Python实现：{d}。",
    "用Python写一个函数，要求{d}。",
)
ZH_NAMED = ("写一个Python函数`{f}`，{d}。", "请写一个名为{f}的函数，{d}。")


def infinitive(text: str) -> str:
    """Third person to infinitive for our own descriptions: "returns x and keeps y" -> "return x and keep y"."""
    first, rest = text.split(" ", 1)
    irregular = {"does": "do", "multiplies": "multiply"}
    first = irregular.get(first, first.removesuffix("s"))
    return f"{first} {re.sub(r' and (keep|return|use)s ', lambda m: f' and {m[1]} ', rest)}"


def request_text(slots: Slots, draft: Draft, zh: bool, wishes: Wishes) -> str:
    """The user's words: what the function does, its name unless it is the usual one, wishes about the code."""
    named = draft.name != draft.family.names[0]
    options = (ZH_NAMED if named else ZH_REQUESTS) if zh else (EN_NAMED if named else EN_REQUESTS)
    what = Template(draft.family.text["zh" if zh else "en"]).substitute(draft.words)
    text = slots.phrase(options).format(f=draft.name, d=what, t=infinitive(what) if not zh else "")
    params = "、".join(draft.params) if zh else " and ".join(draft.params)
    if draft.params[0] != KIND_NAMES[draft.family.kinds[0]].split()[0] or len(draft.params) > 1:
        text += (
            f"参数名用{params}。" if zh else f" Use the parameter name{'s' if len(draft.params) > 1 else ''} {params}."
        )
    if draft.style == "short" and "short" in draft.family.bodies:
        text += "尽量写短一点。" if zh else slots.phrase((" Keep it short.", " Make it as short as possible."))
    if wishes.hints:
        text += "加上类型标注。" if zh else " Add type hints."
    if wishes.docstring:
        text += "加上文档字符串。" if zh else " Add a docstring."
    if wishes.own_args:
        call = call_text(draft.name, draft.args)
        text += (
            f"用{call}做例子。"
            if zh
            else slots.phrase((f" Show the result of {call}.", f" Use {call} as the example."))
        )
    return text


def answer_text(draft: Draft, zh: bool) -> str:
    call = call_text(draft.name, draft.args)
    why = Template(draft.family.text["whyzh" if zh else "why"]).substitute(draft.words)
    if zh:
        return f"代码如下：\n\n```python\n{draft.source}\n```\n\n例如，`{call}`返回`{draft.result!r}`。{why}"
    example = f"For example, `{call}` returns `{draft.result!r}`."
    return f"Here is the function:\n\n```python\n{draft.source}\n```\n\n{example} {why}"


def reasoning_text(draft: Draft, zh: bool) -> str:
    kinds = ", ".join(draft.params)
    if zh:
        return f"函数名是{draft.name}，参数是{kinds}。先写代码，再给出一个例子。"
    return f"The function is {draft.name} with {kinds}. I write the code and then check one example."


def follow_up(slots: Slots, draft: Draft, zh: bool) -> list[dict[str, Any]]:
    """A second turn about the same function: tests, another call, or a rename."""
    kind = slots.phrase(("tests", "call", "rename"))
    if kind == "tests":
        lines = [f"from solution import {draft.name}\n\n"]
        for _ in range(2):
            args = fresh_args(slots, draft.family, TINY)
            call = call_text(draft.name, args)
            lines.append(f"assert {call} == {run_source(draft.source, call)!r}\n")
        ask = (
            "请给它写两个测试。"
            if zh
            else slots.phrase(("Now write two tests for it.", "Add two asserts.", "Please add tests."))
        )
        lead = "测试如下：" if zh else "Here are two tests:"
        return [user(ask), assistant(f"{lead}\n\n```python\n{''.join(lines)}```")]
    if kind == "call":
        call = call_text(draft.name, fresh_args(slots, draft.family, EASY))
        result = run_source(draft.source, call)
        ask = f"{call}的结果是什么？" if zh else slots.phrase((f"What does {call} return?", f"And {call}?"))
        return [user(ask), assistant(f"`{call}`返回`{result!r}`。" if zh else f"`{call}` returns `{result!r}`.")]
    while (new := code_name(slots, draft.family)) == draft.name:
        pass
    source = re.sub(rf"\b{draft.name}\b", new, draft.source)
    ask = (
        f"把函数改名为{new}。"
        if zh
        else slots.phrase((f"Rename it to {new}.", f"Please rename the function to `{new}`."))
    )
    lead = f"已改名为`{new}`：" if zh else f"Renamed to `{new}`:"
    return [user(ask), assistant(f"{lead}\n\n```python\n{source}\n```")]


def class_answer(heads: tuple[str, str, str], source: str, example: str, output: str, why: str) -> str:
    """Class body, usage and its printed output under three headings, then one sentence."""
    blocks = (f"```python\n{source}\n```", f"```python\n{example}\n```", f"```\n{output}```")
    parts = [f"{head}\n\n{block}" for head, block in zip(heads, blocks, strict=True)]
    return "\n\n".join([*parts, why])


def class_sample(slots: Slots, key: str, zh: bool) -> Sample:
    """A small class with an executed usage example."""
    en, zh_text, body, usage, why, why_zh = CLASS_FAMILIES[key]
    while (noun := slots.pick(NOUNS)) in taken_names():
        pass
    words = {
        "C": key.capitalize()
        if slots.chance(0.3)
        else f"{slots.pick(NOUNS).capitalize()}{slots.pick(NOUNS).capitalize()}",
        "v": noun,
        "x": str(slots.integer(1, 99)),
        "y": str(slots.integer(1, 99)),
    }
    source, example = Template(body).substitute(words), Template(usage).substitute(words)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source + "\n\n" + example, "<generated>", "exec"), {})
    what = Template(zh_text if zh else en).substitute(words)
    if zh:
        ask = (
            slots.phrase((f"写{what}。", f"请用Python写{what}。"))
            + f"例子中的变量叫{noun}，用{words['x']}和{words['y']}。"
        )
        answer = class_answer(("代码如下：", "用法：", "输出："), source, example, output.getvalue(), why_zh)
    else:
        ask = slots.phrase((f"Write {what}.", f"I need {what} in Python.", f"Please write {what}."))
        ask += f" In the example call the variable {noun} and use {words['x']} and {words['y']}."
        answer = class_answer(("Here is the class:", "Usage:", "Output:"), source, example, output.getvalue(), why)
    check = {"kind": "code", "run": []}
    return Sample("coding", key, with_system(slots, [user(ask), assistant(answer)]), check=check)


def generate(slots: Slots) -> Sample:
    """One coding conversation of this split."""
    zh = slots.chance(0.25)
    class_keys = [key for key in CLASS_FAMILIES if in_split(key, slots.split, HELD_OUT_FAMILIES)]
    if class_keys and slots.chance(0.08):
        return class_sample(slots, slots.phrase(class_keys), zh)
    family = slots.phrase([family for family in families() if in_split(family.key, slots.split, HELD_OUT_FAMILIES)])
    wishes = Wishes(slots.chance(0.25), slots.chance(0.25), slots.chance(0.5))
    style = "short" if "short" in family.bodies and slots.chance(0.35) else "loop"
    draft = make_draft(slots, family, wishes, style)
    thinking = slots.chance(0.2)
    messages = [
        user(request_text(slots, draft, zh, wishes)),
        assistant(answer_text(draft, zh), reasoning_text(draft, zh) if thinking else ""),
    ]
    if slots.split == TRAIN and not thinking and slots.chance(0.3):
        messages += follow_up(slots, draft, zh)
    tests = []
    for _ in range(3):
        args = fresh_args(slots, family, HARD)
        tests.append((call_text(draft.name, args), repr(run_source(draft.source, call_text(draft.name, args)))))
    check = {"kind": "code", "run": tests}
    return Sample("coding", family.key, with_system(slots, messages), enable_thinking=thinking, check=check)
