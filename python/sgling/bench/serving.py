"""``sgling bench serving``: loads a running server and reports upstream's figures.

Call order as upstream: ``/v1/models`` until it answers, ``/model_info``, warm-up, ``/flush_cache``, a pause, the run,
``/server_info`` (inside the measured time, as upstream).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from datetime import datetime

import numpy as np

from sgling.bench.client import GenerateOptions, RequestResult, run_request
from sgling.bench.datasets import (
    Prompt,
    RandomShape,
    packaged_texts,
    random_id_prompts,
    random_text_prompts,
    sharegpt_texts,
)
from sgling.bench.http_stream import HttpStatusError, fetch
from sgling.bench.metrics import RunMetrics, compute_metrics
from sgling.bench.report import append_record, format_table, json_record, length_warning, output_path
from sgling.bench.tokenizer import BenchTokenizer, FastTokenizer
from sgling.srt.config.bench_args import BenchServingArgs
from sgling.srt.config.environ import bench_authorization
from sgling.srt.config.model_path import resolve_model_path

_WARMUP_OUTPUT_LEN = 32
_PAUSE_S = 1.0


class BenchError(RuntimeError):
    """The run cannot go on."""


async def wait_until_ready(args: BenchServingArgs, headers: dict[str, str]) -> str:
    """Poll ``/v1/models``; returns the first model's name."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            return (await fetch("GET", f"{args.url}/v1/models", headers=headers)).json()["data"][0]["id"]
        except (OSError, EOFError, HttpStatusError) as error:
            if time.monotonic() > deadline:
                raise BenchError(f"no server at {args.url}: {error}") from error
        await asyncio.sleep(0.5)


async def load_tokenizer(args: BenchServingArgs, headers: dict[str, str]) -> BenchTokenizer:
    """The tokenizer named on the command line, else the server's."""
    name = args.tokenizer
    if name is None:
        info = (await fetch("GET", f"{args.url}/model_info", headers=headers)).json()
        name = info.get("tokenizer_path") or info["model_path"]
    return FastTokenizer(resolve_model_path(name))


def make_prompts(args: BenchServingArgs, tokenizer: BenchTokenizer) -> list[Prompt]:
    """The data set the arguments ask for."""
    shape = RandomShape(
        args.num_prompts, args.random_input_len, args.random_output_len, args.random_range_ratio, args.seed
    )
    if args.dataset_name == "random-ids":
        return random_id_prompts(shape, tokenizer, args.tokenize_prompt)
    texts = sharegpt_texts(args.dataset_path) if args.dataset_path else packaged_texts()
    return random_text_prompts(shape, tokenizer, texts, args.tokenize_prompt)


async def warm_up(args: BenchServingArgs, prompt: Prompt, options: GenerateOptions) -> None:
    """Copies of the first request with short answers, then the flush. Raises when all fail, or the flush does."""
    if args.warmup_requests > 0:
        short = prompt._replace(output_len=min(prompt.output_len, _WARMUP_OUTPUT_LEN))
        results = await asyncio.gather(*(run_request(short, options) for _ in range(args.warmup_requests)))
        if not any(result.success for result in results):
            raise BenchError(f"every warm-up request failed: {results[0].error}")
    if args.flush_cache:
        url = f"{args.url}/flush_cache?timeout={args.flush_cache_timeout:g}"
        answer = await fetch("POST", url, headers=options.headers)
        if answer.status != 200:
            raise BenchError(f"/flush_cache answered {answer.status}: {answer.body.decode(errors='replace')}")


async def run_load(args: BenchServingArgs, prompts: Sequence[Prompt], options: GenerateOptions) -> list[RequestResult]:
    """Send every prompt at the asked rate; a request's clock starts after it got its place."""
    places = asyncio.Semaphore(args.max_concurrency or len(prompts))
    rng = np.random.default_rng(args.seed)

    async def limited(prompt: Prompt) -> RequestResult:
        async with places:
            return await run_request(prompt, options)

    tasks = []
    for prompt in prompts:
        if tasks and args.request_rate != float("inf"):
            await asyncio.sleep(rng.exponential(1 / args.request_rate))
        tasks.append(asyncio.create_task(limited(prompt)))
    return await asyncio.gather(*tasks)


async def read_server_info(options: GenerateOptions) -> dict:
    """``/server_info``, or an empty object where a server has none."""
    answer = await fetch("GET", f"{options.url}/server_info", headers=options.headers)
    return answer.json() if answer.status == 200 else {}


async def benchmark(args: BenchServingArgs) -> tuple[RunMetrics, dict, list[RequestResult]]:
    """The whole run: (figures, ``/server_info``, requests)."""
    authorization = bench_authorization()
    headers = {"Authorization": authorization} if authorization else {}
    model = await wait_until_ready(args, headers)
    tokenizer = await load_tokenizer(args, headers)
    prompts = make_prompts(args, tokenizer)
    print(f"{len(prompts)} prompts for {args.model or model} at {args.url}", file=sys.stderr)
    options = GenerateOptions(
        args.url, args.temperature, args.top_p, not args.disable_ignore_eos, args.extra_request_body, headers
    )
    await warm_up(args, prompts[0], options)
    await asyncio.sleep(_PAUSE_S)
    begin = time.perf_counter()
    results = await run_load(args, prompts, options)
    server_info = await read_server_info(options)
    duration = time.perf_counter() - begin
    retokenized = sum(len(tokenizer.encode(result.text)) for result in results if result.success)
    return compute_metrics(results, duration, retokenized), server_info, results


def main(argv: Sequence[str]) -> int:
    """Command-line entry; exit status 1 when the run could not be made or no request succeeded."""
    args = BenchServingArgs.from_cli(argv)
    try:
        metrics, server_info, results = asyncio.run(benchmark(args))
    except (BenchError, HttpStatusError, OSError, ValueError) as error:
        print(f"sgling bench serving: error: {error}", file=sys.stderr)
        return 1
    print(format_table(args, metrics))
    for line in (length_warning(metrics, results), first_error(results)):
        if line:
            print(line, file=sys.stderr)
    append_record(output_path(args, datetime.now()), json_record(args, metrics, server_info, results))
    return 0 if metrics.completed else 1


def first_error(results: Sequence[RequestResult]) -> str | None:
    """What the first failed request ran into."""
    errors = [result.error for result in results if not result.success]
    return f"{len(errors)} requests failed; the first: {errors[0]}" if errors else None
