"""Sends prompts to a target: closed loop (so many in flight) or at a Poisson rate, and the warm-up before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sgling.bench.backends import RequestOptions
from sgling.bench.datasets import Prompt
from sgling.bench.result import RequestResult
from sgling.bench.target import BenchError, Target

_WARMUP_OUTPUT_LEN = 32


class Load(NamedTuple):
    """How hard.

    Attributes:
        max_concurrency: requests in flight at most; None = no limit.
        request_rate: requests per second, exponential gaps; inf = all at once.
        seed: of the arrival times.
    """

    max_concurrency: int | None = None
    request_rate: float = float("inf")
    seed: int = 42


class LoadResult(NamedTuple):
    """Results in prompt order, and seconds from before the first send until ``/server_info`` had answered."""

    results: list[RequestResult]
    duration: float
    server_info: dict


def _ignore(_result: RequestResult) -> None:
    """Progress for callers that show none."""


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    options: RequestOptions,
    load: Load,
    on_result: Callable[[RequestResult], None] = _ignore,
) -> list[RequestResult]:
    """Send every prompt; a request's clock starts after it got its place."""
    places = asyncio.Semaphore(load.max_concurrency or max(len(prompts), 1))
    rng = np.random.default_rng(load.seed)

    async def limited(prompt: Prompt) -> RequestResult:
        async with places:
            result = await target.request(prompt, options)
        on_result(result)
        return result

    tasks = []
    for prompt in prompts:
        if tasks and load.request_rate != float("inf"):
            await asyncio.sleep(rng.exponential(1 / load.request_rate))
        tasks.append(asyncio.create_task(limited(prompt)))
    return await asyncio.gather(*tasks)


async def measure(
    target: Target,
    prompts: Sequence[Prompt],
    options: RequestOptions,
    load: Load,
    on_result: Callable[[RequestResult], None] = _ignore,
) -> LoadResult:
    """:func:`run_load` with upstream's clock: the fetch of ``/server_info`` lies inside the duration."""
    begin = time.perf_counter()
    results = await run_load(target, prompts, options, load, on_result)
    info = await target.info()
    return LoadResult(results, time.perf_counter() - begin, info)


async def warm_up(target: Target, prompt: Prompt, options: RequestOptions, count: int) -> None:
    """Copies of one request with short answers. Raises :class:`BenchError` when all fail."""
    if count <= 0:
        return
    short = prompt._replace(output_len=min(prompt.output_len, _WARMUP_OUTPUT_LEN))
    results = await asyncio.gather(*(target.request(short, options) for _ in range(count)))
    if not any(result.success for result in results):
        raise BenchError(f"every warm-up request failed: {results[0].error}")


async def fill_cache(target: Target, prompts: Sequence[Prompt], options: RequestOptions, load: Load) -> None:
    """Send every prompt once for one token, so that a prefix cache holds all of them."""
    short = [prompt._replace(output_len=1) for prompt in prompts]
    results = await run_load(target, short, options, load._replace(request_rate=float("inf")))
    failed = [result for result in results if not result.success]
    if failed:
        raise BenchError(f"{len(failed)} requests failed while the cache was filled: {failed[0].error}")
