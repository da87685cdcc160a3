"""``sgling sweep depth``: the same prompts at every width, interleaved, on one engine or a running server.

Every request narrows its steps by itself (``speculative.max_width``), so nothing is restarted between points and slow
drifts of the machine hit all widths alike.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from sgling.bench.backends import RequestOptions
from sgling.bench.connect import authorized, load_tokenizer, wait_until_ready
from sgling.bench.datasets import Prompt
from sgling.bench.depth_grid import DepthPoint, format_grid, make_point, recommend, spread_line
from sgling.bench.load import Load, run_load, warm_up
from sgling.bench.metrics import speculation_of, time_per_output_token
from sgling.bench.scenarios import ALL_SCENARIOS, SCENARIOS, scenario_prompt, scenario_samples
from sgling.bench.target import BenchError, EngineTarget, HttpTarget, Target
from sgling.bench.tokenizer import BenchTokenizer, FastTokenizer
from sgling.bench.workload import load_template
from sgling.srt.config.depth_table import DepthTable, never_cheaper
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.config.sweep_args import SweepArgs

READY_S = 60.0


class Subject(NamedTuple):
    """What is swept: a target, its widest step, its prompts and a name for the record."""

    target: Target
    max_width: int
    prompts: list[Prompt]
    name: str


def make_prompts(args: SweepArgs, tokenizer: BenchTokenizer, directory: Path) -> list[Prompt]:
    """Held-out prompts of the built-in scenarios, through the model's chat template where it has one."""
    names = SCENARIOS if args.scenario == ALL_SCENARIOS else (args.scenario,)
    if unknown := set(names) - set(SCENARIOS):
        raise BenchError(f"unknown scenario {unknown.pop()!r}; known are {', '.join((*SCENARIOS, ALL_SCENARIOS))}")
    template = load_template(directory)
    samples = scenario_samples(names, args.prompts, args.seed)
    return [scenario_prompt(sample, template, tokenizer, args.output_len) for sample in samples]


async def measure_point(subject: Subject, width: int, concurrency: int) -> tuple[float, float]:
    """(mean TPOT in ms, accept length) of all prompts at one width."""
    options = RequestOptions(ignore_eos=False, extra={"speculative": {"max_width": width}})
    results = await run_load(subject.target, subject.prompts, options, Load(concurrency))
    failed = [result for result in results if not result.success]
    if failed:
        raise BenchError(f"{len(failed)} requests failed at width {width}: {failed[0].error}")
    tpots = [tpot for tpot in map(time_per_output_token, results) if tpot is not None]
    accept = speculation_of(results).accept_length
    if not tpots or accept is None:
        raise BenchError("no answer has two tokens, or the server does not speculate: nothing to compare")
    return 1000 * mean(tpots), accept


async def sweep(subject: Subject, args: SweepArgs) -> dict[int, list[DepthPoint]]:
    """Points by concurrency, widths ascending."""
    await warm_up(subject.target, subject.prompts[0], RequestOptions(), 1)
    seen: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    widths = range(1, subject.max_width + 1)
    for repeat in range(args.repeats):
        for concurrency in args.batch_sizes:
            for width in widths:
                seen[concurrency, width].append(await measure_point(subject, width, concurrency))
                print(f"repeat {repeat + 1}/{args.repeats}, concurrency {concurrency}, width {width}", file=sys.stderr)
    return {size: [make_point(size, width, seen[size, width]) for width in widths] for size in args.batch_sizes}


def table_of(grid: dict[int, list[DepthPoint]], args: SweepArgs, name: str) -> dict:
    """The file: the step-time table, and beside it what it was made from."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    source = f"sgling sweep depth of {name} on {args.scenario}, {args.prompts} prompts, {now}"
    table = DepthTable(source, {size: never_cheaper([p.step_ms for p in points]) for size, points in grid.items()}, {})
    found = {}
    for size, points in grid.items():
        best, reason = recommend(points)
        found[str(size)] = {
            "recommended_steps": best.steps,
            "reason": reason,
            "points": [vars(point) for point in points],
        }
    return {**table.to_json(), "sweep": found}


def _print_grid(grid: dict[int, list[DepthPoint]]) -> None:
    for size, points in grid.items():
        best, reason = recommend(points)
        print(f"\nconcurrency {size}\n{format_grid(points)}")
        print(f"recommended: --speculative-num-steps {best.steps} ({reason})")
        print(spread_line(points))


async def _server_subject(args: SweepArgs) -> Subject:
    url, headers = args.base_url.rstrip("/"), authorized({})
    name = await wait_until_ready(url, headers, READY_S)
    tokenizer, directory = await load_tokenizer(None, url, headers)
    target = HttpTarget(url, headers=headers)
    info = await target.info()
    width = info.get("speculative_num_draft_tokens")
    if not width:
        raise BenchError(f"the server at {url} does not speculate")
    if info.get("speculative_depth") not in (None, "fixed"):
        raise BenchError(f"the server at {url} chooses its own widths; start it with --speculative-depth fixed")
    if info.get("device") == "cuda" and not info.get("cuda_graph_all_widths"):
        print(
            "only the widest steps of this server run in CUDA graphs, so narrower ones look slow; start it with "
            "--cuda-graph-all-widths",
            file=sys.stderr,
        )
    return Subject(target, min(width, args.max_steps + 1), make_prompts(args, tokenizer, directory), name)


async def _sweep_server(args: SweepArgs) -> tuple[dict, str]:
    subject = await _server_subject(args)
    return await sweep(subject, args), subject.name


def _sweep_engine(args: SweepArgs) -> tuple[dict, str]:
    directory = resolve_model_path(args.tokenizer_path or args.model_path, args.revision, args.download_dir)
    prompts = make_prompts(args, FastTokenizer(directory), directory)
    from sgling import Engine

    with Engine(**args.engine_flags()) as engine:
        subject = Subject(EngineTarget(engine), args.max_steps + 1, prompts, engine.server_args.served_model_name)
        return asyncio.run(sweep(subject, args)), subject.name


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 when the sweep could not be made."""
    args = SweepArgs.from_argv(argv)
    try:
        grid, name = asyncio.run(_sweep_server(args)) if args.base_url else _sweep_engine(args)
    except (BenchError, ServerArgsError, ModelConfigError, OSError, RuntimeError) as error:
        print(f"sgling sweep depth: error: {error}", file=sys.stderr)
        return 1
    _print_grid(grid)
    Path(args.output).write_text(json.dumps(table_of(grid, args, name), indent=1) + "\n", encoding="utf-8")
    print(f"table written: {args.output}; use it with --speculative-depth auto --speculative-depth-table {args.output}")
    return 0
