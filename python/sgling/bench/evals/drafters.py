"""``sgling eval drafters``: NEXTN at every width beside DSPARK drafters, on the path that serves them.

Greedy answers to held-out prompts through the chat template, one at a time: accept length by scenario and position,
TPOT, and their product, the time of one round. Counters are the requests' own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sgling.bench.backends import RequestOptions
from sgling.bench.evals.runner import Answers, answer_all
from sgling.bench.gate.correctness_command import ERRORS
from sgling.bench.gate.subject import OpenSubject, open_subject
from sgling.bench.metrics import speculation_of, time_per_output_token
from sgling.bench.scenarios import scenario_prompt
from sgling.bench.target import BenchError
from sgling.srt.config.eval_args import DraftersArgs
from sgling.srt.config.model_path import EMBEDDED_DRAFTERS, resolve_model_path
from sgling.srt.config.sweep_args import every_width
from sgling.training.generator.base import HELD_OUT
from sgling.training.scorecard import card_samples

JUDGED = ("coding", "tool_calling", "zh_chat", "long_report")
"""Scenarios in which a DSPARK drafter has to beat NEXTN's best accept length, in :data:`NEEDED` of them."""
SCENARIOS = (*JUDGED, "arithmetic", "small_talk")
NEEDED = 3
NEXTN_WIDTHS = (2, 3, 4, 5, 6, 7, 8)


class Contender(NamedTuple):
    """A drafter and the engine flags that use it; ``widths``: what is asked of it, None = all its drafts."""

    name: str
    flags: dict[str, Any]
    widths: tuple[int | None, ...]


def contenders(args: DraftersArgs) -> list[Contender]:
    """NEXTN first, then the DSPARK drafters.

    Raises BenchError for two whose folders have one name, ServerArgsError for one that is nowhere: before the minutes
    that NEXTN takes.
    """
    widths = tuple(args.widths or NEXTN_WIDTHS)
    nextn = {"speculative_algorithm": "NEXTN", "speculative_num_steps": max(widths) - 1}
    nextn |= every_width(args.engine_args.get("device", "auto"))
    found = [Contender("NEXTN", nextn, widths)]
    for name in args.drafters or EMBEDDED_DRAFTERS:
        flags = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": name}
        found.append(Contender(Path(name).name, flags, (None,)))
    names = [contender.name for contender in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BenchError(f"two drafters are called {twice!r}: figures go by the folder's name, so copy or link one")
    for contender in found[1:]:
        resolve_model_path(contender.flags["speculative_draft_model_path"])
    return found


def figures(answers: Answers) -> dict[str, Any]:
    """Accept length, acceptance by position, median TPOT and round time of one scenario at one width."""
    speculation = speculation_of(answers.results)
    if speculation.accept_length is None:
        raise BenchError("the engine did not speculate")
    times = [value for value in map(time_per_output_token, answers.results) if value is not None]
    tpot = median(times) * 1000 if times else None
    return {
        "accept_length": round(speculation.accept_length, 3),
        "acceptance_by_position": [None if rate is None else round(rate, 3) for rate in speculation.position_rates],
        "tpot_ms": None if tpot is None else round(tpot, 3),
        "tpot_x_accept_ms": None if tpot is None else round(tpot * speculation.accept_length, 3),
    }


async def measure(subject: OpenSubject, contender: Contender, args: DraftersArgs) -> dict[str, dict[str, Any]]:
    """{width: {scenario: figures}} of one drafter; width "all" without a limit."""
    found: dict[str, dict[str, Any]] = {}
    template = subject.need_template()
    for width in contender.widths:
        extra = {} if width is None else {"speculative": {"max_width": width}}
        options = RequestOptions(args.temperature, ignore_eos=False, extra=extra)
        entry = found[str(width or "all")] = {}
        for scenario in SCENARIOS:
            samples = card_samples(scenario, HELD_OUT, args.num_questions, args.seed)
            prompts = [scenario_prompt(one, template, subject.tokenizer, args.max_new_tokens) for one in samples]
            entry[scenario] = figures(await answer_all(subject.target, prompts, options, args))
        lengths = ", ".join(f"{name} {value['accept_length']:.2f}" for name, value in entry.items())
        print(f"{contender.name}, width {width or 'all'}: {lengths}", file=sys.stderr, flush=True)
    return found


async def evaluate(args: DraftersArgs) -> dict[str, Any]:
    """All drafters, and the comparison."""
    begin = time.perf_counter()
    measured, info = {}, {}
    for contender in contenders(args):
        engine_args = {**args.engine_args, **contender.flags}
        async with open_subject(replace(args, engine_args=engine_args)) as subject:
            measured[contender.name] = await measure(subject, contender, args)
            info = await subject.target.info()
    return {
        "model": args.model_path,
        "date": datetime.now(UTC).date().isoformat(),
        "where": {name: info.get(name) for name in ("device", "dtype", "version")},
        "questions": {name: getattr(args, name) for name in ("num_questions", "max_new_tokens", "parallel", "seed")},
        "seconds": round(time.perf_counter() - begin, 1),
        "drafters": measured,
        "comparison": compare(measured),
    }


def best(widths: dict[str, dict[str, Any]], scenario: str) -> tuple[str, float]:
    """(width, accept length) that is longest."""
    lengths = {width: entry[scenario]["accept_length"] for width, entry in widths.items()}
    width = max(lengths, key=lengths.get)
    return width, lengths[width]


def compare(measured: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Which scenarios each DSPARK drafter wins against NEXTN's best width."""
    nextn = {scenario: best(measured["NEXTN"], scenario) for scenario in SCENARIOS}
    return {
        name: {
            scenario: {
                "accept_length": best(widths, scenario)[1],
                "nextn_best": nextn[scenario][1],
                "nextn_width": nextn[scenario][0],
                "wins": best(widths, scenario)[1] > nextn[scenario][1],
            }
            for scenario in SCENARIOS
        }
        for name, widths in measured.items()
        if name != "NEXTN"
    }


def wins(comparison: dict[str, Any]) -> int:
    """Judged scenarios a drafter wins."""
    return sum(comparison[scenario]["wins"] for scenario in JUDGED)


def format_report(report: dict[str, Any]) -> str:
    """Markdown tables: accept length, TPOT x accept length, acceptance by position."""
    rows = [(name, width, entry) for name, widths in report["drafters"].items() for width, entry in widths.items()]
    lines = ["accept length, and TPOT x accept length in ms (the time of a round)", ""]
    lines += [f"| drafter | width | {' | '.join(SCENARIOS)} |", f"|{'---|' * (2 + len(SCENARIOS))}"]
    for name, width, entry in rows:
        cells = []
        for scenario in SCENARIOS:
            found = entry[scenario]
            timed = found["tpot_ms"] is not None
            cost = f" ({found['tpot_ms']:.2f}: {found['tpot_x_accept_ms']:.1f})" if timed else ""
            cells.append(f"{found['accept_length']:.2f}{cost}")
        lines.append(f"| {name} | {width} | {' | '.join(cells)} |")
    lines += ["", "In brackets: TPOT in ms, and TPOT x accept length.", "", "acceptance by position", ""]
    for name, width, entry in rows:
        if name == "NEXTN" and width != max(report["drafters"]["NEXTN"], key=int):
            continue
        for scenario in JUDGED:
            rates = entry[scenario]["acceptance_by_position"]
            text = " ".join("-" if rate is None else f"{rate:.2f}" for rate in rates)
            lines.append(f"- {name}, width {width}, {scenario}: {text}")
    for name, comparison in report["comparison"].items():
        share = f"{wins(comparison)} of {len(JUDGED)} judged scenarios"
        lines += ["", f"{name} beats NEXTN's best accept length in {share}:"]
        for scenario in JUDGED:
            one = comparison[scenario]
            lines.append(
                f"- {scenario}: {one['accept_length']:.2f} against {one['nextn_best']:.2f} (width {one['nextn_width']})"
            )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 when the first DSPARK drafter wins too few scenarios, or on failure."""
    args = DraftersArgs.read(argv, "sgling eval drafters")
    try:
        report = asyncio.run(evaluate(args))
    except ERRORS as error:
        print(f"sgling eval drafters: error: {error}", file=sys.stderr)
        return 1
    print(format_report(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    first = next(iter(report["comparison"].values()))
    return 0 if args.report_only or wins(first) >= NEEDED else 1
