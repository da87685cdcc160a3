"""What evaluations share: open the subject, send the questions, time the whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from sgling.bench.backends import RequestOptions
from sgling.bench.datasets import Prompt
from sgling.bench.load import Load, run_load
from sgling.bench.metrics import accept_length
from sgling.bench.progress import Progress
from sgling.bench.result import RequestResult
from sgling.bench.target import BenchError, Target
from sgling.srt.config.eval_args import EvalArgs


class Answers(NamedTuple):
    """Answers in question order, seconds for all of them."""

    results: list[RequestResult]
    latency: float

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(result.output_len for result in self.results) / self.latency if self.latency else 0.0

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step; None without speculation."""
        return accept_length(self.results)


async def answer_all(target: Target, prompts: Sequence[Prompt], options: RequestOptions, args: EvalArgs) -> Answers:
    """Send every question. Raises :class:`BenchError` when one fails: a score over the rest would mislead."""
    progress = Progress(len(prompts), enabled=not args.disable_tqdm)
    begin = time.perf_counter()
    results = await run_load(target, prompts, options, Load(args.parallel), progress.add)
    latency = time.perf_counter() - begin
    progress.close()
    failed = [result.error for result in results if not result.success]
    if failed:
        raise BenchError(f"{len(failed)} of {len(results)} questions failed; the first: {failed[0]}")
    return Answers(results, latency)
