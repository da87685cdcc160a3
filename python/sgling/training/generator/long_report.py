"""Long-report scenario: figures in the request, a report of 300 to 1,200 tokens that repeats and compares them."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import report_texts as texts
from .base import TRAIN, Sample, Slots, assistant, in_split, user, with_system
from .pools import CITIES, NOUNS, WORDS

HELD_OUT_FAMILIES = frozenset({"bikes", "农场"})


class Metric(NamedTuple):
    """One figure of the request: name, unit, the value before and now."""

    name: str
    unit: str
    before: int
    now: int


class Plan(NamedTuple):
    """Everything the report must repeat."""

    title: str
    organisation: str
    before: str
    now: str
    metrics: list[Metric]
    table: bool


def make_plan(slots: Slots, domain: str, zh: bool) -> Plan:
    title, metrics = (texts.ZH_DOMAINS if zh else texts.EN_DOMAINS)[domain]
    before, now = slots.phrase(texts.ZH_PERIODS if zh else texts.EN_PERIODS)
    city_en, city_zh = slots.pick(CITIES)
    organisation = (
        f"{city_zh}{domain}"
        if zh
        else slots.phrase(
            (f"the {city_en} {domain}", f"{slots.pick(WORDS).capitalize()} {slots.pick(WORDS).capitalize()}")
        )
    )
    chosen = []
    for name, unit in slots.rng.sample(metrics, slots.integer(2, 5)):
        if not zh and slots.split == TRAIN and slots.chance(0.2):
            name, unit = (
                slots.phrase((slots.pick(WORDS), f"{slots.pick(WORDS)} {slots.pick(NOUNS)}")),
                slots.pick(NOUNS) + "s",
            )
        base = slots.integer(20, slots.phrase((99, 900, 3000)))
        chosen.append(
            Metric(
                name, unit, base, base if slots.chance(0.06) else max(3, base + slots.integer(-base // 2, base // 2))
            )
        )
    return Plan(title, organisation, before, now, chosen, slots.chance(0.3))


def request_text(slots: Slots, plan: Plan, zh: bool) -> str:
    if zh:
        figures = "；".join(
            f"{m.name}：{plan.before}{m.before}{m.unit}，{plan.now}{m.now}{m.unit}" for m in plan.metrics
        )
        ask = slots.phrase(
            (
                f"请为{plan.organisation}写一份{plan.title}。",
                f"写一份{plan.organisation}{plan.now}的{plan.title}。",
                f"帮我写{plan.organisation}的{plan.title}，要详细。",
            )
        )
        return f"{ask}数据如下：{figures}。" + ("请加一个表格。" if plan.table else "")
    figures = "; ".join(f"{m.name}: {m.before} {m.unit} in {plan.before}, {m.now} in {plan.now}" for m in plan.metrics)
    if slots.chance(0.3):
        figures = (
            "\n"
            + "\n".join(f"- {m.name} ({m.unit}): {plan.before} {m.before}, {plan.now} {m.now}" for m in plan.metrics)
            + "\n"
        )
    kind = plan.title.lower()
    ask = slots.phrase(
        (
            f"Write a detailed {kind} for {plan.organisation}.",
            f"Please write a long {kind} about {plan.organisation} for {plan.now}.",
            f"I need a {kind} for {plan.organisation}.",
            f"Prepare the {kind} of {plan.organisation}.",
        )
    )
    return f"{ask} Figures: {figures}{'' if figures.endswith(chr(10)) else '.'}" + (
        " Include a table." if plan.table else ""
    )


def en_change(metric: Metric) -> str:
    low, high = sorted((metric.before, metric.now))
    return f"{high} - {low} = {high - low}"


def en_summary(metric: Metric) -> str:
    if metric.now == metric.before:
        return f"{metric.name} stayed at {metric.now} {metric.unit}"
    verb = "rose" if metric.now > metric.before else "fell"
    return f"{metric.name} {verb} from {metric.before} to {metric.now} {metric.unit}"


def en_report(slots: Slots, plan: Plan) -> str:
    """The English report; one section per metric, in the order of the request."""
    lead = f"This report covers {plan.organisation} in {plan.now} and compares it with {plan.before}."
    parts = [
        f"# {plan.title}: {plan.organisation}, {plan.now}",
        f"## Summary\n\n{lead} "
        + " ".join((text := en_summary(metric))[0].upper() + text[1:] + "." for metric in plan.metrics),
    ]
    if plan.table:
        rows = [f"| {m.name} | {m.before} | {m.now} | {m.now - m.before:+d} |" for m in plan.metrics]
        parts.append(
            "\n".join([f"| metric | {plan.before} | {plan.now} | change |", "| --- | --- | --- | --- |", *rows])
        )
    for metric in plan.metrics:
        first = f"In {plan.now} {metric.name} came to {metric.now} {metric.unit},"
        first += f" compared with {metric.before} in {plan.before}."
        if metric.now == metric.before:
            middle = slots.phrase(texts.EN_FLAT)
        else:
            up = metric.now > metric.before
            middle = f"The difference is {en_change(metric)} {metric.unit} {'more' if up else 'less'}. "
            middle += " ".join(slots.rng.sample(texts.EN_UP if up else texts.EN_DOWN, slots.integer(1, 2)))
        outlook = slots.phrase(texts.EN_OUTLOOK).format(m=metric.name, o=plan.organisation)
        parts.append(
            f"## {metric.name.capitalize()}\n\n{first} {middle} {slots.phrase(texts.EN_CAUSES)} "
            + (outlook[0].upper() + outlook[1:])
        )
    parts.append(
        "## Risks\n\n" + "\n".join(f"- {risk}" for risk in slots.rng.sample(texts.EN_RISKS, slots.integer(2, 4)))
    )
    steps = slots.rng.sample(texts.EN_STEPS, slots.integer(2, 4))
    parts.append(
        "## Next steps\n\n"
        + "\n".join(f"{i + 1}. {step.format(m=slots.phrase(plan.metrics).name)}" for i, step in enumerate(steps))
    )
    conclusion = slots.phrase(texts.EN_CONCLUSIONS).format(o=plan.organisation)
    parts.append(f"## Conclusion\n\n{conclusion[0].upper() + conclusion[1:]}")
    return "\n\n".join(parts)


def zh_report(slots: Slots, plan: Plan) -> str:
    """The Chinese report, same structure."""

    def summary(m: Metric) -> str:
        if m.now == m.before:
            return f"{m.name}保持在{m.now}{m.unit}。"
        return f"{m.name}从{m.before}{m.unit}{'增加' if m.now > m.before else '减少'}到{m.now}{m.unit}。"

    parts = [
        f"# {plan.organisation}{plan.now}{plan.title}",
        f"## 摘要\n\n本报告介绍{plan.organisation}{plan.now}的情况，并与{plan.before}比较。"
        + "".join(map(summary, plan.metrics)),
    ]
    if plan.table:
        rows = [f"| {m.name} | {m.before} | {m.now} | {m.now - m.before:+d} |" for m in plan.metrics]
        parts.append("\n".join([f"| 指标 | {plan.before} | {plan.now} | 变化 |", "| --- | --- | --- | --- |", *rows]))
    for metric in plan.metrics:
        first = f"{plan.now}{metric.name}为{metric.now}{metric.unit}，{plan.before}为{metric.before}{metric.unit}。"
        if metric.now == metric.before:
            middle = slots.phrase(texts.ZH_FLAT)
        else:
            up = metric.now > metric.before
            middle = f"相差{en_change(metric)}{metric.unit}。" + "".join(
                slots.rng.sample(texts.ZH_UP if up else texts.ZH_DOWN, slots.integer(1, 2))
            )
        parts.append(
            f"## {metric.name}\n\n{first}{middle}{slots.phrase(texts.ZH_CAUSES)}"
            + slots.phrase(texts.ZH_OUTLOOK).format(m=metric.name)
        )
    parts.append(
        "## 风险\n\n" + "\n".join(f"- {risk}" for risk in slots.rng.sample(texts.ZH_RISKS, slots.integer(2, 4)))
    )
    steps = slots.rng.sample(texts.ZH_STEPS, slots.integer(2, 4))
    parts.append(
        "## 下一步\n\n"
        + "\n".join(f"{i + 1}. {step.format(m=slots.phrase(plan.metrics).name)}" for i, step in enumerate(steps))
    )
    parts.append("## 结论\n\n" + slots.phrase(texts.ZH_CONCLUSIONS).format(o=plan.organisation))
    return "\n\n".join(parts)


def plain_sample(slots: Slots, zh: bool) -> Sample:
    """A report request without figures: the answer says so and stays general."""
    topic = (
        slots.pick(texts.ZH_PLAIN) if zh else slots.phrase((slots.pick(texts.EN_PLAIN), " ".join(slots.some(WORDS, 2))))
    )
    if zh:
        ask = slots.phrase(
            (f"写一份关于{topic}的报告。", f"请写一篇长一点的{topic}报告。", f"写一篇关于{topic}的文章。")
        )
        parts = [
            f"# {topic}报告",
            f"## 摘要\n\n本报告讨论{topic}。请求里没有数据，所以内容比较概括。",
            "## 现状\n\n" + "".join(slots.rng.sample(texts.ZH_CAUSES, 3)),
            "## 风险\n\n" + "\n".join(f"- {risk}" for risk in slots.rng.sample(texts.ZH_RISKS, 3)),
            "## 下一步\n\n"
            + "\n".join(
                f"{i + 1}. {step.format(m=topic)}" for i, step in enumerate(slots.rng.sample(texts.ZH_STEPS, 3))
            ),
            "## 结论\n\n" + slots.phrase(texts.ZH_CONCLUSIONS).format(o=topic),
        ]
    else:
        ask = slots.phrase(
            (
                f"Write a report about {topic}.",
                f"Write a long report on {topic}.",
                f"Please write an essay about {topic}.",
                f"I need a report on {topic}.",
            )
        )
        ending = slots.phrase(texts.EN_CONCLUSIONS).format(o=topic)
        parts = [
            f"# Report: {topic}",
            f"## Summary\n\nThis report looks at {topic}. No figures were given, so it stays general.",
            "## Situation\n\n" + " ".join(slots.rng.sample(texts.EN_CAUSES, 3)),
            "## Risks\n\n" + "\n".join(f"- {risk}" for risk in slots.rng.sample(texts.EN_RISKS, 3)),
            "## Next steps\n\n"
            + "\n".join(
                f"{i + 1}. {step.format(m=topic)}" for i, step in enumerate(slots.rng.sample(texts.EN_STEPS, 3))
            ),
            f"## Conclusion\n\n{ending[0].upper() + ending[1:]}",
        ]
    messages = [user(ask), assistant("\n\n".join(parts))]
    return Sample("long_report", "plain", with_system(slots, messages), check={"kind": "report", "figures": []})


def generate(slots: Slots) -> Sample:
    """One report request of this split."""
    zh = slots.chance(0.25)
    if slots.split == TRAIN and slots.chance(0.08):
        return plain_sample(slots, zh)
    domains = [d for d in (texts.ZH_DOMAINS if zh else texts.EN_DOMAINS) if in_split(d, slots.split, HELD_OUT_FAMILIES)]
    domain = slots.phrase(domains)
    plan = make_plan(slots, domain, zh)
    thinking = slots.chance(0.12)
    reasoning = (
        "；".join(f"{m.name}：{en_change(m)}" for m in plan.metrics)
        if zh
        else "\n".join(f"{m.name}: {en_change(m)}" for m in plan.metrics)
    )
    report = zh_report(slots, plan) if zh else en_report(slots, plan)
    messages: list[dict[str, Any]] = [
        user(request_text(slots, plan, zh)),
        assistant(report, reasoning if thinking else ""),
    ]
    figures = [str(value) for m in plan.metrics for value in (m.before, m.now)]
    return Sample(
        "long_report",
        domain,
        with_system(slots, messages),
        enable_thinking=thinking,
        check={"kind": "report", "figures": figures},
    )
