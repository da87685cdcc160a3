"""Run metrics from request results, by upstream's definitions.

A figure that does not exist (no request succeeded, every answer had one token, speculation is off) is None, never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sgling.bench.client import RequestResult

STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")


@dataclass(frozen=True)
class Distribution:
    """Statistics of a sample in milliseconds; all None for an empty sample. Percentiles are linear."""

    mean: float | None
    median: float | None
    std: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @staticmethod
    def of_seconds(sample: Sequence[float]) -> Distribution:
        """Statistics of a sample given in seconds."""
        if not len(sample):
            return Distribution(*[None] * 7)
        values = np.asarray(sample, dtype=np.float64) * 1000
        p90, p95, p99 = (float(np.percentile(values, q)) for q in (90, 95, 99))
        return Distribution(
            float(values.mean()), float(np.median(values)), float(values.std()), p90, p95, p99, float(values.max())
        )


@dataclass(frozen=True)
class RunMetrics:
    """Figures of one run. Rates are per second, latencies in milliseconds.

    Attributes:
        input_lens: (mean, min, max) prompt tokens as the server counted them.
        accept_length: tokens committed per verify step, over this run's requests; None without speculation.
        peak_output_throughput: tokens in the fullest of the fixed one-second buckets since the first send.
        peak_concurrent_requests: requests that touch one such bucket, at most.
        concurrency: sum of latencies / duration.
    """

    completed: int
    failed: int
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    total_output_tokens_retokenized: int | None
    input_lens: tuple[float, int, int] | None
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    peak_output_throughput: int
    peak_concurrent_requests: int
    concurrency: float
    accept_length: float | None
    e2e_latency: Distribution
    ttft: Distribution
    tpot: Distribution
    itl: Distribution


def time_per_output_token(result: RequestResult) -> float | None:
    """(latency - TTFT) / (output length - 1), in seconds; None for a single token."""
    if result.output_len <= 1:
        return None
    return (result.latency - result.ttft) / (result.output_len - 1)


def server_input_len(result: RequestResult) -> int:
    """Prompt length as the server counted it, else as it was asked."""
    return result.meta_info.get("prompt_tokens", result.input_len)


def accept_length(results: Iterable[RequestResult]) -> float | None:
    """Tokens committed per verify step over these requests, bonus included.

    Committed tokens are one per verify plus the accepted drafts, so the figure lies in 1 ... K + 1; a server that does
    not count accepted drafts is taken at its completion tokens.
    """
    committed = steps = 0
    for result in results:
        verify = result.meta_info.get("spec_verify_ct") or 0
        correct = result.meta_info.get("spec_num_correct_drafts")
        steps += verify
        committed += (result.output_len if correct is None else verify + correct) if verify else 0
    return committed / steps if steps else None


def peak_output_throughput(results: Sequence[RequestResult]) -> int:
    """Tokens of the fullest one-second bucket; buckets start at the earliest send."""
    begin = min((result.start for result in results), default=0.0)
    buckets: Counter[int] = Counter()
    for result in results:
        times = accumulate(result.itl, initial=result.start + result.ttft)
        buckets.update(math.floor(moment - begin) for moment in times)
    return max(buckets.values(), default=0)


def peak_concurrent_requests(results: Sequence[RequestResult]) -> int:
    """Requests that touch one and the same one-second bucket, at most."""
    begin = min((result.start for result in results), default=0.0)
    buckets: Counter[int] = Counter()
    for result in results:
        first, last = (math.floor(moment - begin) for moment in (result.start, result.start + result.latency))
        buckets.update(range(first, last + 1))
    return max(buckets.values(), default=0)


def compute_metrics(results: Sequence[RequestResult], duration: float, retokenized: int | None = None) -> RunMetrics:
    """Figures of a run that took ``duration`` seconds; ``retokenized``: output tokens by the client's tokenizer."""
    done = [result for result in results if result.success]
    inputs = [server_input_len(result) for result in done]
    total_in, total_out = sum(inputs), sum(result.output_len for result in done)
    tpots = [tpot for tpot in map(time_per_output_token, done) if tpot is not None]

    def per_second(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    return RunMetrics(
        completed=len(done),
        failed=len(results) - len(done),
        duration=duration,
        total_input_tokens=total_in,
        total_output_tokens=total_out,
        total_output_tokens_retokenized=retokenized,
        input_lens=(total_in / len(done), min(inputs), max(inputs)) if done else None,
        request_throughput=per_second(len(done)),
        input_throughput=per_second(total_in),
        output_throughput=per_second(total_out),
        total_throughput=per_second(total_in + total_out),
        peak_output_throughput=peak_output_throughput(done),
        peak_concurrent_requests=peak_concurrent_requests(done),
        concurrency=per_second(sum(result.latency for result in done)),
        accept_length=accept_length(done),
        e2e_latency=Distribution.of_seconds([result.latency for result in done]),
        ttft=Distribution.of_seconds([result.ttft for result in done]),
        tpot=Distribution.of_seconds(tpots),
        itl=Distribution.of_seconds([gap for result in done for gap in result.itl]),
    )
