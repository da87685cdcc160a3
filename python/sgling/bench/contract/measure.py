"""Measures the cells of a contract: one scenario at one concurrency in one cache state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from sgling.bench.backends import RequestOptions
from sgling.bench.contract.schema import Contract, Scenario
from sgling.bench.datasets import Prompt, RandomShape, packaged_texts, random_text_prompts
from sgling.bench.gate.subject import OpenSubject
from sgling.bench.load import Load, fill_cache, run_load, warm_up
from sgling.bench.metrics import compute_metrics
from sgling.bench.result import RequestResult
from sgling.bench.scenarios import (
    ALL_SCENARIOS,
    SCENARIOS,
    judge_answer,
    scenario_prompt,
    scenario_samples,
    success_rate,
)
from sgling.bench.target import Target

_KEEP_SPECIAL = {"skip_special_tokens": False}  # calls are marked by special tokens
_PLAIN = {"speculative": {"enabled": False}}
ROLLBACK = "rollback"


class Cell(NamedTuple):
    """What was measured where. ``values`` lacks the metrics that do not exist there."""

    name: str
    scenario: str
    values: dict[str, float]
    errors: list[str]


def cell_name(scenario: str, concurrency: int, run: str) -> str:
    """Name of a cell in reports and baselines."""
    return f"{scenario}/c{concurrency}/{run}"


def scenario_prompts(scenario: Scenario, subject: OpenSubject) -> list[Prompt]:
    """The prompts of a scenario, the same ones every time."""
    if scenario.dataset == "random":
        shape = RandomShape(scenario.requests, scenario.input_len, scenario.output_len, 1.0, scenario.seed)
        return random_text_prompts(shape, subject.tokenizer, packaged_texts())
    names = SCENARIOS if scenario.dataset == ALL_SCENARIOS else (scenario.dataset,)
    template = subject.need_template()
    samples = scenario_samples(names, scenario.requests, scenario.seed)
    return [scenario_prompt(sample, template, subject.tokenizer, scenario.output_len) for sample in samples]


def scenario_options(scenario: Scenario) -> RequestOptions:
    """Answers to random prompts run to their length; the others end where the model ends them."""
    is_random = scenario.dataset == "random"
    return RequestOptions(scenario.temperature, ignore_eos=is_random, sampling={} if is_random else _KEEP_SPECIAL)


def decode_steps(server_info: dict) -> tuple[int, int]:
    """(all decode steps, those at width 1 or outside a captured graph); (0, 0) when the server does not count them."""
    state = (server_info.get("internal_states") or [{}])[0]
    if "decode_steps_fallback" not in state:
        return 0, 0
    return state["decode_steps"], state["decode_steps_fallback"]


def invalid_call_rate(pairs: Sequence[tuple[Prompt, RequestResult]]) -> float | None:
    """Share of answers to prompts with tools that hold a call that is cut off, not offered, or broken."""
    answers = [(prompt, result) for prompt, result in pairs if prompt.tools and result.success]
    if not answers:
        return None
    return sum(has_invalid_call(prompt, result) for prompt, result in answers) / len(answers)


def has_invalid_call(prompt: Prompt, result: RequestResult) -> bool:
    """Whether an answer holds a call nobody could run."""
    is_cut = result.text.count("<tool_call>") != result.text.count("</tool_call>")
    return is_cut or not judge_answer(prompt, result).get("parses", True)


def cell_values(prompts: Sequence[Prompt], results: list[RequestResult], steps: tuple[int, int]) -> dict[str, float]:
    """The bounded figures of one cell; ``steps`` = (decode steps, fallback steps) during it."""
    metrics, pairs = compute_metrics(results, 1.0), list(zip(prompts, results, strict=True))
    values = {
        "ttft_p95_ms": metrics.ttft.p95,
        "tpot_p95_ms": metrics.tpot.p95,
        "e2e_p99_ms": metrics.e2e_latency.p99,
        "accept_length": metrics.speculation.accept_length,
        "fallback_ratio": steps[1] / steps[0] if steps[0] else None,
        "task_success": success_rate(pairs),
        "invalid_tool_calls": invalid_call_rate(pairs),
        "failed_requests": metrics.failed,
    }
    return {name: value for name, value in values.items() if value is not None}


async def measure_cell(
    target: Target, prompts: Sequence[Prompt], options: RequestOptions, concurrency: int, run: str
) -> tuple[dict[str, float], list[RequestResult]]:
    """Bring the cache into its state, send the prompts, work out the figures."""
    load = Load(max_concurrency=concurrency)
    await target.flush()
    if run == "warm":
        await fill_cache(target, prompts, options, load)
    before = decode_steps(await target.info())
    results = await run_load(target, prompts, options, load)
    after = decode_steps(await target.info())
    return cell_values(prompts, results, (after[0] - before[0], after[1] - before[1])), results


async def measure_contract(
    contract: Contract, subject: OpenSubject, on_cell: Callable[[str], None] = print
) -> list[Cell]:
    """Every cell of the contract, in order; the rollback run last."""
    cells = []
    for scenario in contract.scenarios:
        prompts, options = scenario_prompts(scenario, subject), scenario_options(scenario)
        await warm_up(subject.target, prompts[0], options, 1)
        for concurrency in scenario.concurrency:
            for run in scenario.runs:
                name = cell_name(scenario.name, concurrency, run)
                on_cell(name)
                values, results = await measure_cell(subject.target, prompts, options, concurrency, run)
                cells.append(Cell(name, scenario.name, values, _errors(results)))
    if contract.rollback is not None:
        on_cell(ROLLBACK)
        cells.append(await measure_rollback(contract.scenarios[0], subject))
    return cells


async def measure_rollback(scenario: Scenario, subject: OpenSubject) -> Cell:
    """The first scenario with speculation off: ready means the same answers, at a speed one can live with."""
    prompts, options = scenario_prompts(scenario, subject), scenario_options(scenario)
    spoken = await run_load(subject.target, prompts, options, Load(1))
    values, results = await measure_cell(subject.target, prompts, replace(options, extra=_PLAIN), 1, "cold")
    errors = _errors(results)
    for number, (one, other) in enumerate(zip(spoken, results, strict=True)):
        if one.output_ids != other.output_ids:
            errors.append(f"answer {number} differs with speculation off")
    return Cell(ROLLBACK, ROLLBACK, values, errors)


def _errors(results: Sequence[RequestResult]) -> list[str]:
    return [result.error for result in results if not result.success]
