"""``sgling ab``: reads two records, or measures two servers prompt by prompt in turn, and prints the comparison."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sgling.bench.ab import (
    Comparison,
    compare,
    format_comparison,
    read_runs,
    run_of_requests,
    same_prompts,
    verdict,
    workload_difference,
)
from sgling.bench.connect import authorized, load_tokenizer, wait_until_ready
from sgling.bench.http_stream import HttpStatusError
from sgling.bench.load import warm_up
from sgling.bench.metrics import compute_metrics
from sgling.bench.progress import Progress
from sgling.bench.report import append_record, json_record, request_record
from sgling.bench.result import RequestResult
from sgling.bench.serving import Run, request_options
from sgling.bench.target import BenchError, HttpTarget
from sgling.bench.workload import load_template, make_prompts, with_scale
from sgling.srt.config.ab_args import AbArgs, is_url
from sgling.srt.config.flags import ServerArgsError


async def interleave(args: AbArgs) -> tuple[AbArgs, list[list[RequestResult]]]:
    """Answers of A and B: every prompt goes to both, one after the other, and who is first alternates."""
    headers = authorized(args.headers)
    targets, models = [], []
    for url in (args.a, args.b):
        models.append(await wait_until_ready(url.rstrip("/"), headers, args.ready_check_timeout_sec))
    tokenizer, directory = await load_tokenizer(args.tokenizer, args.a.rstrip("/"), headers)
    targets = [HttpTarget(url.rstrip("/"), args.backend, headers, tokenizer) for url in (args.a, args.b)]
    args = with_scale(args, await targets[0].info())
    prompts = make_prompts(args, tokenizer, load_template(directory))
    options = [request_options(args, model) for model in models]
    for target, option in zip(targets, options, strict=True):
        await warm_up(target, prompts[0], option, args.warmup_requests)
    progress = Progress(2 * len(prompts), enabled=not args.disable_tqdm)
    answers: list[list[RequestResult]] = [[], []]
    for number, prompt in enumerate(prompts):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            answers[side].append(await targets[side].request(prompt, options[side]))
            progress.add(answers[side][-1])
    progress.close()
    return args, answers


def _compare_servers(args: AbArgs) -> Comparison:
    args, answers = asyncio.run(interleave(args))
    runs = []
    for name, results in zip("AB", answers, strict=True):
        failed = [result.error for result in results if not result.success]
        if failed:
            raise BenchError(f"{len(failed)} requests to {name} failed; the first: {failed[0]}")
        if args.output_file:
            metrics = compute_metrics(results, sum(result.latency for result in results))
            record = json_record(Run("default", replace(args, tag=name), metrics, results, {}))
            append_record(Path(args.output_file), record)
        runs.append(run_of_requests([request_record(result) for result in results]))
    return compare(runs[:1], runs[1:], paired=True, interleaved=True, resamples=args.resamples)


def _compare_records(args: AbArgs) -> Comparison:
    (a, first), (b, second) = read_runs(args.a), read_runs(args.b)
    difference = workload_difference(first, second)
    if difference and not args.different_workloads:
        raise BenchError(f"records of different workloads: {difference} (--different-workloads compares them anyway)")
    paired = not difference and same_prompts(first, second)
    return compare(a, b, paired, interleaved=False, resamples=args.resamples)


def _json(result: Comparison, outcome: str, text: str) -> dict:
    sides = {name: side._asdict() for name, side in (("a", result.a), ("b", result.b))}
    intervals = {name: getattr(result, name)._asdict() for name in ("tpot", "accept", "step")}
    return {"outcome": outcome, "verdict": text, **sides, **intervals, "paired": result.paired, "drift": result.drift}


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 for errors, and for a slower B with ``--fail-if-slower``."""
    args = AbArgs.from_argv(argv)
    try:
        result = _compare_servers(args) if is_url(args.a) else _compare_records(args)
    except (BenchError, HttpStatusError, OSError, ValueError, ServerArgsError) as error:
        print(f"sgling ab: error: {error}", file=sys.stderr)
        return 1
    decided = verdict(result, args.min_effect)
    print(format_comparison(result, decided))
    if args.json:
        text = json.dumps(_json(result, decided.outcome, decided.text), indent=1)
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return int(args.fail_if_slower and decided.outcome == "slower")
