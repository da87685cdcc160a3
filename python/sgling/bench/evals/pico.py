"""``sgling eval pico``: the gates of the embedded model, measured on the path that serves it.

Shares come from answers (greedy by default) to prompts of unseen words and unseen families; accept lengths from the
requests' own counters at every verify width; perplexity from the model's logprobs of the right answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sgling.bench.backends import RequestOptions
from sgling.bench.datasets import Prompt
from sgling.bench.evals.runner import Answers, answer_all
from sgling.bench.gate.correctness_command import ERRORS
from sgling.bench.gate.subject import OpenSubject, open_subject
from sgling.bench.metrics import speculation_of
from sgling.bench.scenarios import judge_answer, scenario_prompt
from sgling.bench.target import BenchError
from sgling.srt.config.eval_args import PicoArgs
from sgling.srt.config.sweep_args import every_width
from sgling.training.generator.base import HELD_OUT
from sgling.training.generator.mix import SCENARIOS, render_answer
from sgling.training.scorecard import WIDTH, WIDTHS, accept_figures, card_samples, gates, shares, splits_of

ENGINE_ARGS = {"speculative_algorithm": "NEXTN", "speculative_num_steps": max(WIDTHS) - 1}


def _options(args: PicoArgs, width: int) -> RequestOptions:
    sampling = {"skip_special_tokens": False}  # calls are marked by special tokens
    extra = {"speculative": {"max_width": width}}
    return RequestOptions(args.temperature, ignore_eos=False, sampling=sampling, extra=extra)


def make_prompts(subject: OpenSubject, scenario: str, split: str, args: PicoArgs) -> list[Prompt]:
    """The prompts of one split of a scenario."""
    count = args.num_questions if split == HELD_OUT else args.family_questions
    template = subject.need_template()
    samples = card_samples(scenario, split, count, args.seed)
    return [scenario_prompt(sample, template, subject.tokenizer, args.max_new_tokens) for sample in samples]


def split_figures(prompts: Sequence[Prompt], answers: Answers) -> dict[str, float]:
    """Shares and accept length of one split. Raises BenchError when nothing was speculated."""
    if answers.accept_length is None:
        raise BenchError("the server does not speculate: there is no accept length to judge")
    judged = [judge_answer(prompt, result) for prompt, result in zip(prompts, answers.results, strict=True)]
    return shares(judged) | {"accept_length": round(answers.accept_length, 3)}


async def accept_by_width(
    subject: OpenSubject, prompts: Sequence[Prompt], answers: Answers, args: PicoArgs
) -> dict[str, Any]:
    """Accept figures of the same prompts at every width; those at :data:`WIDTH` are answered already."""
    histograms = {}
    for width in WIDTHS:
        asked = answers if width == WIDTH else await answer_all(subject.target, prompts, _options(args, width), args)
        histograms[width] = speculation_of(asked.results[: len(prompts)]).histogram
    return accept_figures(histograms)


async def perplexity(subject: OpenSubject, prompts: Sequence[Prompt], args: PicoArgs) -> float:
    """exp(mean negative logprob) of the right answers' tokens, end token included."""
    total = count = 0.0
    for prompt in prompts:
        ids = subject.tokenizer.encode(f"{prompt.text}{render_answer(prompt.sample)}<|role_end|>")
        extra = {"return_logprob": True, "logprob_start_len": prompt.input_len}
        options = RequestOptions(ignore_eos=False, extra=extra)
        answers = await answer_all(subject.target, [Prompt(ids, None, 1)], options, replace(args, disable_tqdm=True))
        logprobs = [entry[0] for entry in answers.results[0].meta_info["input_token_logprobs"]]
        total, count = total - sum(logprobs), count + len(logprobs)
    return round(math.exp(total / count), 4)


async def scenario_entry(subject: OpenSubject, scenario: str, args: PicoArgs) -> dict[str, Any]:
    """The score card's entry of a scenario."""
    entry: dict[str, Any] = {}
    for split in splits_of(scenario):
        print(f"{scenario}, {split}", file=sys.stderr)
        prompts = make_prompts(subject, scenario, split, args)
        answers = await answer_all(subject.target, prompts, _options(args, WIDTH), args)
        entry[split] = split_figures(prompts, answers)
        if split == HELD_OUT:
            again = prompts[: args.width_questions]
            entry |= await accept_by_width(subject, again, answers, args)
            entry["perplexity"] = await perplexity(subject, again, args)
    return entry


async def evaluate(args: PicoArgs) -> dict[str, Any]:
    """The whole card: entries by scenario, gates, and which of them are missed."""
    begin = time.perf_counter()
    graphs = every_width(args.engine_args.get("device", "auto"))
    args = replace(args, engine_args=ENGINE_ARGS | graphs | args.engine_args)
    async with open_subject(args) as subject:
        scenarios = {scenario: await scenario_entry(subject, scenario, args) for scenario in SCENARIOS}
        info = await subject.target.info()
    found = gates(scenarios)
    return {
        "model": subject.model,
        "date": datetime.now(UTC).date().isoformat(),
        "where": {name: info.get(name) for name in ("device", "dtype", "version")},
        "questions": {
            name: getattr(args, name) for name in ("num_questions", "family_questions", "width_questions", "seed")
        },
        "seconds": round(time.perf_counter() - begin, 1),
        "scenarios": scenarios,
        "gates": [gate._asdict() | {"reached": gate.reached} for gate in found],
        "missed": [gate.name for gate in found if not gate.reached],
    }


def format_card(report: dict[str, Any]) -> str:
    """What is printed."""
    lines = [f"{'scenario':13} {'split':11} {'answers':>7}  accept  checks"]
    for scenario, entry in report["scenarios"].items():
        for split in splits_of(scenario):
            figures = dict(entry[split])
            count, accept = figures.pop("answers"), figures.pop("accept_length")
            checks = "  ".join(f"{name} {share:.3f}" for name, share in figures.items())
            lines.append(f"{scenario:13} {split:11} {count:7d}  {accept:6.3f}  {checks}")
    lines += ["", f"{'scenario':13} {'perplexity':>10}  accept length by width; acceptance by position"]
    for scenario, entry in report["scenarios"].items():
        widths = "  ".join(f"{width}: {length:.3f}" for width, length in entry["accept_length_by_width"].items())
        rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in entry["acceptance_by_position"])
        lines.append(f"{scenario:13} {entry['perplexity']:10.3f}  {widths};  {rates}")
    lines.append("")
    for gate in report["gates"]:
        verdict = "reached" if gate["reached"] else f"MISSED by {gate['bound'] - gate['value']:.3f}"
        lines.append(f"{gate['name']:27} {gate['value']:.3f} (>= {gate['bound']:.2f})  {verdict}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 when a gate is missed (unless ``--report-only``) or could not be measured."""
    args = PicoArgs.read(argv, "sgling eval pico")
    try:
        report = asyncio.run(evaluate(args))
    except ERRORS as error:
        print(f"sgling eval pico: error: {error}", file=sys.stderr)
        return 1
    print(format_card(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if not report["missed"]:
        print("all gates reached")
        return 0
    print(f"MISSED: {', '.join(report['missed'])}")
    return 0 if args.report_only else 1
