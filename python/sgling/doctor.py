"""``sgling doctor``: what was detected, what the engine chooses and why, and whether speculation pays here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from sgling.bench.datasets import Prompt
from sgling.bench.depth_grid import DepthPoint, format_grid, make_point, margins, recommend, spread_line
from sgling.bench.depth_sweep import Subject, measure_point
from sgling.bench.scenarios import SCENARIOS, scenario_prompt, scenario_samples
from sgling.bench.target import BenchError, EngineTarget
from sgling.bench.tokenizer import FastTokenizer
from sgling.bench.workload import load_template
from sgling.srt.config.acceptance import MAX_NEW_TOKENS, Acceptance, floor_key, read_acceptance
from sgling.srt.config.choices import explain_choices
from sgling.srt.config.doctor_args import DoctorArgs
from sgling.srt.config.draft_model import acceptance_dir
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.config.sweep_args import at_fixed_depth
from sgling.srt.managers.acceptance_smoke import SmokeResult, judge, smoke_body
from sgling.srt.managers.scheduler_job import SchedulerJob, make_job
from sgling.srt.observability.machine import cpu_facts, gpu_facts, package_facts

_REPEATS, _FLOOR_PROMPTS = 3, 8


def section(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A titled block of aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines or ["none"])])


def machine_section() -> str:
    """What was detected."""
    return section("Machine", [*cpu_facts(), *gpu_facts(), *package_facts()])


def choices_section(given: ServerArgs, resolved: ServerArgs) -> str:
    """What was chosen, why, and how to choose otherwise."""
    rows = [(c.name, c.value, c.reason, c.flag) for c in explain_choices(given, resolved)]
    return section("Choices (value, reason, flag to override)", rows)


def model_section(job: SchedulerJob) -> str:
    """The model's shape."""
    config = job.model_config
    rows = [
        ("architecture", config.architecture),
        ("directory", str(job.model_dir)),
        ("layers", f"{len(config.kda_layer_ids)} KDA + {len(config.mla_layer_ids)} MLA, hidden {config.hidden_size}"),
        ("experts", f"{config.num_experts}, {config.num_experts_per_tok} per token"),
        ("NEXTN layer", "yes" if config.num_nextn_predict_layers else "no: it cannot draft for itself"),
        ("tokenizer", str(job.tokenizer_dir or "none: only token ids are served")),
    ]
    return section("Model", rows)


def memory_section(plan: dict) -> str:
    """Where the memory of one rank goes."""
    kv_bytes = plan["max_total_tokens"] * plan["kv_bytes_per_token"]
    left = plan["budget_bytes"] - plan["weight_bytes"] - plan["state_bytes"] - kv_bytes
    rows = [
        ("budget", f"{plan['budget_bytes'] / 1e9:8.3f} GB", "free memory x --mem-fraction-static"),
        ("weights", f"{plan['weight_bytes'] / 1e9:8.3f} GB", "one rank's share"),
        (
            "states",
            f"{plan['state_bytes'] / 1e9:8.3f} GB",
            f"recurrent states of {plan['max_running_requests']} requests",
        ),
        (
            "KV cache",
            f"{kv_bytes / 1e9:8.3f} GB",
            f"{plan['max_total_tokens']} tokens of {plan['kv_bytes_per_token']} B",
        ),
        ("unused", f"{left / 1e9:8.3f} GB", f"context {plan['context_len']}, page {plan['page_size']}"),
    ]
    return section("Memory plan", rows)


def warnings_section(info: dict) -> str:
    """Fast paths that refused, flags without effect, and what makes the host wait."""
    refused = info["internal_states"][0]["refused_fast_paths"]
    rows = [("refused fast path", f"{name}: {reason}") for name, reason in refused.items()]
    rows += [("no effect", notice) for notice in info["notices"]]
    if info["needs_cpu_seq_lens"]:
        names = ", ".join(info["pinning_backends"])
        rows.append(("host waits", f"{names} needs exact lengths on the host: every step waits for the one before"))
    rows += [("ignored tensor", name) for name in info["ignored_tensors"]]
    return section("Refusals and notices", rows)


def scenario_texts(job: SchedulerJob) -> tuple[str, ...]:
    """Prompts for a first floor: held-out ones of the built-in scenarios, in the model's own chat format."""
    directory = job.tokenizer_dir or job.model_dir
    template, tokenizer = load_template(directory), FastTokenizer(directory)
    samples = scenario_samples(SCENARIOS, _FLOOR_PROMPTS, seed=1)
    return tuple(scenario_prompt(sample, template, tokenizer, MAX_NEW_TOKENS).text for sample in samples)


def measure_widths(engine: Any, acceptance: Acceptance) -> list[DepthPoint]:
    """Every width on the fixed prompts."""
    encode = engine.tokenizer_manager.codec.encode
    prompts = [Prompt(encode(text), text, MAX_NEW_TOKENS) for text in acceptance.prompts]
    width = engine.server_args.spec.width
    subject = Subject(EngineTarget(engine), width, prompts, "doctor")

    async def grid() -> list[DepthPoint]:
        await measure_point(subject, width, 1)  # warm-up
        seen = {w: [] for w in range(1, width + 1)}
        for _ in range(_REPEATS):
            for w, repeats in seen.items():
                repeats.append(await measure_point(subject, w, 1))
        return [make_point(1, w, repeats) for w, repeats in seen.items()]

    return asyncio.run(grid())


def advised(best: DepthPoint, algorithm: str | None) -> str:
    """Flags that serve at the recommended width; NEXTN counts steps, DSPARK the drafts of a block."""
    if algorithm != "DSPARK":
        return f"--speculative-num-steps {best.steps}"
    return f"--speculative-dspark-block-size {best.steps}" if best.steps else "--speculative-algorithm none"


def speculation_section(points: Sequence[DepthPoint], smoke: SmokeResult, algorithm: str | None) -> str:
    """Break-even accept length of this machine, what was measured, and the verdict."""
    last = points[-1]
    break_even = last.step_ms / points[0].step_ms
    best, reason = recommend(points)
    grown = margins(points)[-1]
    floor = "none recorded (--record-floor records it)" if smoke.floor is None else f"{smoke.floor:.2f}"
    verdict = {None: "", True: ": passed", False: ": FAILED, the drafter accepts too little"}[smoke.passed]
    return "\n".join(
        [
            "Speculation on this machine (fixed prompts, one request)",
            *(f"  {line}" for line in format_grid(points).splitlines()),
            f"  break-even accept length of width {last.width}: {break_even:.2f}; found {last.accept:.2f}",
            f"  the last draft pays above {grown.cost:+.1%} accept length; it brought {grown.accept:+.1%}",
            f"  recommended on these prompts: {advised(best, algorithm)} ({reason})",
            f"  {spread_line(points)}",
            f"  acceptance smoke: accept length {smoke.accept_length:.2f}, floor {floor}{verdict}",
        ]
    )


def examine(args: DoctorArgs, job: SchedulerJob) -> int:
    """Everything that needs a loaded model; exit status 1 when the acceptance smoke fails."""
    from sgling import Engine

    directory = acceptance_dir(job.server_args, job.model_dir)
    acceptance = read_acceptance(directory)
    if args.record_floor and not acceptance.accept_lengths:
        acceptance = Acceptance(scenario_texts(job), {})
    flags = at_fixed_depth(args)
    if job.server_args.spec.depth != "fixed":
        flags["speculative_num_steps"] = job.server_args.spec.num_steps
    with Engine(**flags) as engine:
        info = engine.get_server_info()
        print("\n" + memory_section(info["memory_plan"]))
        spec = engine.server_args.spec
        smoke = None
        if spec.enabled and spec.width > 1 and engine.tokenizer_manager.codec is not None:
            points = measure_widths(engine, acceptance)
            body = smoke_body(acceptance)
            smoke = judge(engine.generate(body["text"], body["sampling_params"]), acceptance, spec)
            print("\n" + speculation_section(points, smoke, spec.algorithm))
        print("\n" + warnings_section(engine.get_server_info()))
    if smoke is None:
        return 0
    if args.record_floor:
        path = acceptance.with_measured(spec, smoke.accept_length).write(directory)
        print(f"\nfloor recorded for {floor_key(spec)}: {path}")
    return 1 if smoke.passed is False else 0


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 when the model cannot be served or its drafter accepts too little."""
    args = DoctorArgs.from_argv(argv)
    print(machine_section())
    try:
        resolved = args.resolved()
        job = make_job(resolved)
        print("\n" + choices_section(args, job.server_args))
        print("\n" + model_section(job))
        return 0 if args.static else examine(args, job)
    except (ServerArgsError, ModelConfigError, BenchError, RuntimeError, OSError) as error:
        print(f"\nsgling doctor: error: {error}", file=sys.stderr)
        return 1
