"""Tool-calling scenario: native call form, distractors, two calls, missing arguments, errors, refusals, results."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .base import TRAIN, Sample, Slots, assistant, in_split, user, with_system
from .pools import NOUNS, VERBS
from .tool_values import Value, json_schema, make_value

HELD_OUT_FAMILIES = frozenset(
    {"get_air_quality", "set_timer", "check_stock", "find_parking", "get_grade", "delete_file"}
)


class Param(NamedTuple):
    """A parameter: alternative names (the first is the slot name), whether required, value kind, description."""

    names: tuple[str, ...]
    required: bool
    kind: str
    description: str


class Spec(NamedTuple):
    """One tool of ``families/tools.txt``: names, descriptions, parameters, requests, result fields, answers."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    params: tuple[Param, ...]
    requests: dict[bool, tuple[str, ...]]
    results: tuple[tuple[str, str], ...]
    answers: dict[bool, str]

    @property
    def key(self) -> str:
        return self.names[0]


class Tool(NamedTuple):
    """A spec with the names drawn for one sample. ``arg_names`` maps slot names to parameter names."""

    spec: Spec
    name: str
    arg_names: dict[str, str]
    schema: dict[str, Any]


class Call(NamedTuple):
    """One intended call: the request text, the arguments and the spoken values."""

    tool: Tool
    request: str
    arguments: dict[str, Any]
    spoken: dict[str, str]


def parse_spec(block: str) -> Spec:
    """Reads one ``@`` block: d descriptions, p parameters, en / zh requests, r result fields, an / zn answers."""
    lines = block.strip().split("\n")
    params: list[Param] = []
    fields: dict[str, str] = {}
    for line in lines[1:]:
        tag, _, text = line.partition(": ")
        if tag == "p":
            head, _, description = text.partition(" | ")
            names, mark, kind = head.split(" ", 2)
            params.append(Param(tuple(names.split("/")), mark == "!", kind, description))
        else:
            fields[tag] = text
    split = {tag: tuple(part.strip() for part in fields[tag].split(" | ")) for tag in ("d", "en", "zh")}
    results = tuple(tuple(part.split("=", 1)) for part in re.split(r" (?=\w+=)", fields["r"]))
    return Spec(
        tuple(lines[0].split()),
        split["d"],
        tuple(params),
        {False: split["en"], True: split["zh"]},
        results,
        {False: fields["an"], True: fields["zn"]},
    )


@cache
def specs() -> tuple[Spec, ...]:
    """All tools of the tool file."""
    text = (Path(__file__).parent / "families" / "tools.txt").read_text(encoding="utf-8")
    return tuple(parse_spec(block) for block in text.split("@ ")[1:])


KINDS = (
    "city",
    "person",
    "date",
    "time",
    "int:1..500",
    "int:1..20",
    "float",
    "bool",
    "topic",
    "item",
    "code",
    "word",
    "path",
    "email",
)


def synthetic_spec(slots: Slots) -> Spec:
    """A tool that exists in this sample only, so that calls are learned from the schema and not by heart."""
    verb, noun = slots.pick(VERBS), slots.pick(NOUNS)
    params = []
    for name in slots.some(NOUNS, slots.integer(0, 3)):
        kind = slots.phrase(KINDS) if slots.chance(0.8) else "enum:" + ",".join(slots.some(NOUNS, 3))
        params.append(Param((name,), slots.chance(0.8), kind, f"The {name} of the {noun}"))
    listed = [param for param in params if param.required or slots.chance(0.5)]
    slots_en = [f"{param.names[0]} {{{param.names[0]}}}" for param in listed]
    pairs = ", ".join(f"{param.names[0]} = {{{param.names[0]}}}" for param in listed)
    name = f"{verb}_{noun}" + (f"_{slots.pick(NOUNS)}" if slots.chance(0.3) else "")
    spoken = name.replace("_", " ")
    if listed:
        zh_pairs = "，".join(f"{param.names[0]}为{{{param.names[0]}}}" for param in listed)
        tail = slots_en[0] if len(slots_en) == 1 else f"{', '.join(slots_en[:-1])} and {slots_en[-1]}"
        en = (
            f"Please {spoken} with {tail}.",
            f"Call {name} with {pairs}.",
            f"{spoken}: {pairs}",
            f"I want to {spoken} using {tail}.",
        )
        zh = (f"请调用{name}，{zh_pairs}。", f"用{name}，{zh_pairs}。")
    else:
        en, zh = (f"Please {spoken}.", f"Call {name}.", f"Run {name}."), (f"请调用{name}。",)
    results = ((slots.pick(NOUNS), slots.phrase(("int:1..900", "code", "enum:done,ok,open"))),)
    field = results[0][0]
    return Spec(
        (name,),
        (f"{verb.capitalize()} the {noun}",),
        tuple(params),
        {False: en, True: zh},
        results,
        {False: f"The {field} is {{{field}}}.", True: f"{field}是{{{field}}}。"},
    )


def make_tool(slots: Slots, spec: Spec) -> Tool:
    """Draws the names and builds the OpenAI-style schema; a third of training tools have names met nowhere else."""
    renamed = slots.split == TRAIN and len(spec.names) > 1 and slots.chance(0.35)
    name = spec.names[0] if slots.chance(0.5) else slots.phrase(spec.names)
    if renamed:
        name = f"{slots.pick(VERBS)}_{slots.pick(NOUNS)}"
    arg_names: dict[str, str] = {}
    for param in spec.params:
        options = [option for option in param.names if option not in arg_names.values()]
        if renamed and slots.chance(0.6):
            options = [option for option in slots.some(NOUNS, 4) if option not in arg_names.values()]
        arg_names[param.names[0]] = (
            param.names[0] if slots.chance(0.5) and param.names[0] in options else slots.phrase(options)
        )
    properties = {arg_names[param.names[0]]: json_schema(param.kind, param.description) for param in spec.params}
    required = [arg_names[param.names[0]] for param in spec.params if param.required]
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    function = {"name": name, "description": slots.phrase(spec.descriptions), "parameters": parameters}
    return Tool(spec, name, arg_names, {"type": "function", "function": function})


def fill(template: str, words: dict[str, str]) -> str:
    return re.sub(r"\{([\w.]+)\}", lambda match: words[match[1]], template)


def make_call(slots: Slots, tool: Tool, zh: bool) -> Call:
    """A request for one tool and the call it asks for; optional arguments stand in it exactly when named."""
    template = slots.phrase(tool.spec.requests[zh])
    fixed = {name: text == "true" for name, text in re.findall(r"\{=(\w+):(\w+)\}", template)}
    template = re.sub(r"\{=[^}]*\}", "", template)
    arguments: dict[str, Any] = {}
    spoken: dict[str, str] = {}
    for param in tool.spec.params:
        slot = param.names[0]
        if slot in fixed:
            value = Value("", fixed[slot])
        elif f"{{{slot}}}" in template or f"{{{slot}." in template:
            value = make_value(slots, param.kind, zh)
        else:
            continue
        spoken[slot] = value.spoken
        if isinstance(value.json, dict):
            spoken.update({f"{slot}.{key}": str(part) for key, part in value.json.items()})
        arguments[tool.arg_names[slot]] = value.json
    return Call(tool, fill(template, spoken), arguments, spoken)


def offer(slots: Slots, tools: list[Tool], extra: int) -> list[dict[str, Any]]:
    """The wanted tools among ``extra`` distractors, shuffled."""
    used = {tool.name for tool in tools}
    schemas = [tool.schema for tool in tools]
    while extra > 0:
        other = make_tool(slots, random_spec(slots))
        if other.name not in used:
            used.add(other.name)
            schemas.append(other.schema)
            extra -= 1
    slots.rng.shuffle(schemas)
    return schemas


def random_spec(slots: Slots) -> Spec:
    if slots.split == TRAIN and slots.chance(0.35):
        return synthetic_spec(slots)
    return slots.phrase([spec for spec in specs() if in_split(spec.key, slots.split, HELD_OUT_FAMILIES)])


def result_turns(slots: Slots, calls: list[Call], zh: bool) -> list[dict[str, Any]]:
    """Tool results and the one-sentence answer per call; one result in ten is an error."""
    messages: list[dict[str, Any]] = []
    sentences = []
    for call in calls:
        if slots.chance(0.08):
            error = slots.phrase(("not found", "timeout", "service unavailable", "permission denied"))
            messages.append({"role": "tool", "content": json.dumps({"error": error})})
            sentences.append(f"{call.tool.name}失败了：{error}。" if zh else f"{call.tool.name} failed: {error}.")
            continue
        values = {name: make_value(slots, kind, zh) for name, kind in call.tool.spec.results}
        content = json.dumps({name: value.json for name, value in values.items()}, ensure_ascii=False)
        messages.append({"role": "tool", "content": content})
        words = {**call.spoken, **{name: value.spoken for name, value in values.items()}}
        words = {slot: words.get(slot, "") for slot in re.findall(r"\{([\w.]+)\}", call.tool.spec.answers[zh])}
        sentences.append(fill(call.tool.spec.answers[zh], words))
    text = ("" if zh else " ").join(sentences)
    return [*messages, assistant(text)]


def call_turn(calls: list[Call], lead: str, reasoning: str) -> dict[str, Any]:
    return assistant(lead, reasoning, [{"name": call.tool.name, "arguments": call.arguments} for call in calls])


def reasoning_text(calls: list[Call], zh: bool) -> str:
    names = ", ".join(call.tool.name for call in calls)
    return f"需要调用{names}。" if zh else f"The function to use is {names}."


def expected(calls: list[Call]) -> dict[str, Any]:
    return {"kind": "tool", "calls": [{"name": call.tool.name, "arguments": call.arguments} for call in calls]}


def refusal_sample(slots: Slots, zh: bool) -> Sample:
    """A request none of the offered functions can serve, or small talk beside a tool list."""
    call = make_call(slots, make_tool(slots, random_spec(slots)), zh)
    tools = [
        tool for tool in offer(slots, [call.tool], slots.integer(1, 3)) if tool["function"]["name"] != call.tool.name
    ]
    names = [tool["function"]["name"] for tool in tools]
    if slots.chance(0.3):
        ask, answer = slots.phrase(
            (("谢谢！", "不客气！"), ("你好", "你好！有什么可以帮你？"))
            if zh
            else (("Thanks!", "You are welcome!"), ("Hello", "Hello! How can I help you?"))
        )
        return Sample(
            "tool_calling",
            "chat",
            with_system(slots, [user(ask), assistant(answer)]),
            tools,
            check={"kind": "tool", "calls": []},
        )
    joined = "、".join(names) if zh else ", ".join(names)
    answer = (
        f"现有的函数做不到这件事。可用的函数：{joined}。"
        if zh
        else f"None of my functions can do that. I have: {joined}."
    )
    messages = with_system(slots, [user(call.request), assistant(answer)])
    return Sample("tool_calling", "refusal", messages, tools, check={"kind": "tool", "calls": []})


def missing_sample(slots: Slots, zh: bool) -> Sample:
    """A request without its arguments: the model asks, the user answers, the call follows."""
    while True:
        tool = make_tool(slots, slots.phrase([s for s in specs() if in_split(s.key, slots.split, HELD_OUT_FAMILIES)]))
        needed = [param for param in tool.spec.params if param.required]
        if all(param.kind.split(":")[0] not in ("bool", "object") for param in needed):
            break
    values = {tool.arg_names[param.names[0]]: make_value(slots, param.kind, zh) for param in needed}
    what = tool.schema["function"]["description"]
    wants = [param.description[0].lower() + param.description[1:] for param in needed]
    if zh:
        ask, question = f"请使用{tool.name}。", f"请告诉我：{'、'.join(values)}。"
        reply = "，".join(value.spoken for value in values.values())
    else:
        ask = slots.phrase((f"Can you {what[0].lower()}{what[1:]}?", f"Please {what[0].lower()}{what[1:]}."))
        question = f"Please tell me: {', '.join(wants)}."
        reply = ", ".join(value.spoken for value in values.values())
    call = Call(tool, ask, {name: value.json for name, value in values.items()}, {})
    messages = [user(ask), assistant(question), user(reply), call_turn([call], "", "")]
    return Sample(
        "tool_calling",
        "missing",
        with_system(slots, messages),
        offer(slots, [tool], slots.integer(0, 2)),
        check={"kind": "tool", "calls": []},
    )


def generate(slots: Slots) -> Sample:
    """One tool-calling conversation of this split."""
    zh = slots.chance(0.35)
    draw = slots.rng.random()
    if draw < 0.08 and slots.split == TRAIN:
        return refusal_sample(slots, zh)
    if draw < 0.14 and slots.split == TRAIN:
        return missing_sample(slots, zh)
    tool = make_tool(slots, random_spec(slots))
    calls = [make_call(slots, tool, zh)]
    if draw < 0.24:
        second = tool if slots.chance(0.5) else make_tool(slots, random_spec(slots))
        if second.name != tool.name or second is tool:
            calls.append(make_call(slots, second, zh))
    request = calls[0].request
    if len(calls) == 2:
        join = slots.phrase(("另外，", "还有，")) if zh else slots.phrase((" Also: ", " And then: ", " Next, please: "))
        request += join + calls[1].request
    thinking = slots.chance(0.2)
    messages = [user(request), call_turn(calls, "", reasoning_text(calls, zh) if thinking else "")]
    if slots.chance(0.6):
        messages += result_turns(slots, calls, zh)
        if slots.split == TRAIN and slots.chance(0.15):
            more = make_call(slots, tool, zh)
            messages += [user(more.request), call_turn([more], "", "")]
    tools = offer(
        slots, list({call.tool.name: call.tool for call in calls}.values()), slots.phrase((0, 0, 1, 1, 2, 2, 3, 4))
    )
    return Sample("tool_calling", tool.spec.key, with_system(slots, messages), tools, thinking, expected(calls))
