"""``sgling bench serving``: loads a running server and reports upstream's figures.

Call order as upstream: ``/v1/models`` until it answers, ``/model_info``, warm-up, ``/flush_cache``, a pause, the run,
``/server_info`` (inside the measured time, as upstream).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from sgling.bench.backends import RequestOptions
from sgling.bench.connect import authorized, load_tokenizer, wait_until_ready
from sgling.bench.datasets import Prompt
from sgling.bench.http_stream import HttpStatusError
from sgling.bench.load import Load, fill_cache, measure, warm_up
from sgling.bench.metrics import RunMetrics, compute_metrics, server_speculation
from sgling.bench.progress import Progress
from sgling.bench.report import append_record, format_extras, format_table, json_record, output_path
from sgling.bench.result import RequestResult
from sgling.bench.target import BenchError, HttpTarget
from sgling.bench.tokenizer import BenchTokenizer
from sgling.bench.workload import load_template, make_prompts, with_scale
from sgling.srt.config.bench_args import BenchServingArgs
from sgling.srt.config.flags import ServerArgsError

_PAUSE_S = 1.0


class Run(NamedTuple):
    """One measured run.

    Attributes:
        cache_state: "default", "cold" or "warm".
        args: the flags with counts and lengths filled in.
    """

    cache_state: str
    args: BenchServingArgs
    metrics: RunMetrics
    results: list[RequestResult]
    server_info: dict


def request_options(args: BenchServingArgs, model: str) -> RequestOptions:
    """How every request of the run is sent. Answers of built-in scenarios may end where the model ends them."""
    extra = dict(args.extra_request_body)
    if args.return_logprob and args.backend in ("sglang", "sglang-native"):
        names = ("return_logprob", "top_logprobs_num", "logprob_start_len")
        extra = {name: getattr(args, name) for name in names} | extra
    ignore_eos = not (args.disable_ignore_eos or args.is_scenario)
    sampling = {"skip_special_tokens": False} if args.is_scenario and not args.backend.endswith("-chat") else {}
    return RequestOptions(
        temperature=args.temperature,
        top_p=args.top_p,
        ignore_eos=ignore_eos,
        stream=not args.disable_stream,
        model=args.served_model_name or args.model or model,
        sampling={} if args.backend.startswith("vllm") else sampling,
        extra=extra,
    )


async def prepare_cache(args: BenchServingArgs, target: HttpTarget, prompts: list[Prompt], state: str) -> None:
    """Bring the prefix cache into the state that is measured."""
    if state == "cold" or args.flush_cache:
        await target.flush()
    if state == "warm":
        load = Load(args.max_concurrency or 16, seed=args.seed)
        await fill_cache(target, prompts, request_options(args, "default"), load)


async def run_once(args: BenchServingArgs, target: HttpTarget, prompts: list[Prompt], options: RequestOptions) -> Run:
    """Measure one run over the cache as it is; ``args.cache_state`` names its state."""
    await asyncio.sleep(_PAUSE_S)
    before = await target.info()
    progress = Progress(len(prompts), enabled=not args.disable_tqdm)
    load = Load(args.max_concurrency, args.request_rate, args.seed)
    if args.profile:
        await target.post("/start_profile")
    results, duration, info = await measure(target, prompts, options, load, progress.add)
    if args.profile:
        await target.post("/stop_profile")
    progress.close()
    metrics = compute_metrics(results, duration, _retokenized(results, target.tokenizer))
    if metrics.speculation.accept_length is None and metrics.completed:
        metrics = replace(metrics, speculation=server_speculation(before, info))
    return Run(args.cache_state, args, metrics, results, info)


def _retokenized(results: Sequence[RequestResult], tokenizer: BenchTokenizer) -> int:
    return sum(len(tokenizer.encode(result.reasoning + result.text)) for result in results if result.success)


async def benchmark(args: BenchServingArgs) -> list[Run]:
    """The whole command: one run, or a cold and a warm one."""
    headers = authorized(args.headers)
    model = await wait_until_ready(args.url, headers, args.ready_check_timeout_sec)
    tokenizer, directory = await load_tokenizer(args.tokenizer, args.url, headers)
    target = HttpTarget(args.url, args.backend, headers, tokenizer, args.flush_cache_timeout)
    args = with_scale(args, await target.info())
    prompts = make_prompts(args, tokenizer, load_template(directory))
    print(f"{len(prompts)} prompts for {args.model or model} at {args.url}", file=sys.stderr)
    options = request_options(args, model)
    await warm_up(target, prompts[0], options, args.warmup_requests)
    runs = []
    for state in ("cold", "warm") if args.cache_state == "both" else (args.cache_state,):
        await prepare_cache(args, target, prompts, state)
        runs.append(await run_once(replace(args, cache_state=state), target, prompts, options))
    return runs


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 when the run could not be made or no request succeeded."""
    args = BenchServingArgs.from_cli(argv)
    try:
        runs = asyncio.run(benchmark(args))
    except (BenchError, HttpStatusError, OSError, ValueError, ServerArgsError) as error:
        print(f"sgling bench serving: error: {error}", file=sys.stderr)
        return 1
    for run in runs:
        show(run)
        append_record(output_path(run.args, datetime.now()), json_record(run))
    return 0 if all(run.metrics.completed for run in runs) else 1


def show(run: Run) -> None:
    """Print the table and what upstream's table has no row for; problems go to stderr."""
    print(format_table(run.args, run.metrics))
    print(format_extras(run))
    errors = [result.error for result in run.results if not result.success]
    if errors:
        print(f"{len(errors)} requests failed; the first: {errors[0]}", file=sys.stderr)
