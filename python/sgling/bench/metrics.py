"""The one implementation of every figure: request results in, run metrics out, by upstream's definitions.

A figure that does not exist (no request succeeded, every answer had one token, speculation is off) is None, never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sgling.bench.result import RequestResult
from sgling.srt.observability.acceptance import position_rates

STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
_PHASES = 100  # positions of the one-second grid that are tried for the peak's band


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


class Speculation(NamedTuple):
    """Acceptance over a set of requests.

    Attributes:
        accept_length: tokens committed per verify step, bonus included; None without speculation.
        source: where it comes from: "requests" (their own counters), "server" (difference of the server's counters over
            the run) or "server average" (includes earlier traffic); None without speculation.
        histogram: verify steps by number of accepted drafts, 0 ... K; empty when the server does not tell.
    """

    accept_length: float | None = None
    source: str | None = None
    histogram: tuple[int, ...] = ()

    @property
    def position_rates(self) -> list[float | None]:
        """Share of drafts accepted at position 1 ... K among those whose predecessors were accepted."""
        return position_rates(self.histogram)


@dataclass(frozen=True)
class RunMetrics:
    """Figures of one run. Rates are per second, latencies in milliseconds.

    Attributes:
        input_lens: (mean, min, max) prompt tokens as the server counted them.
        speculation: acceptance over this run's requests.
        cached_tokens: prompt tokens the server took from its prefix cache.
        peak_output_throughput: tokens in the fullest of the fixed one-second buckets since the first send.
        peak_band: that figure's least and greatest value as the grid is shifted: how much of it is luck.
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
    peak_band: tuple[int, int]
    peak_concurrent_requests: int
    concurrency: float
    cached_tokens: int
    speculation: Speculation
    e2e_latency: Distribution
    ttft: Distribution
    tpot: Distribution
    itl: Distribution


def tpot_of(latency: float, ttft: float, tokens: int) -> float | None:
    """Time per output token without the first: (latency - TTFT) / (tokens - 1); None for fewer than two tokens."""
    return (latency - ttft) / (tokens - 1) if tokens > 1 else None


def time_per_output_token(result: RequestResult) -> float | None:
    """TPOT of a request in seconds; None for a single token or an answer that was not streamed."""
    return tpot_of(result.latency, result.ttft, result.output_len) if result.streamed else None


def server_input_len(result: RequestResult) -> int:
    """Prompt length as the server counted it, else as it was asked."""
    return result.meta_info.get("prompt_tokens", result.input_len)


def accept_length_of(verify_steps: int, correct_drafts: int) -> float | None:
    """Tokens committed per verify step: the bonus of every step plus the accepted drafts; None without a step."""
    return (verify_steps + correct_drafts) / verify_steps if verify_steps else None


def committed_and_steps(result: RequestResult) -> tuple[int, int]:
    """(tokens committed by verify steps, verify steps) of a request; (0, 0) without speculation.

    A server that does not count accepted drafts is taken at its completion tokens.
    """
    verify = result.meta_info.get("spec_verify_ct") or 0
    correct = result.meta_info.get("spec_num_correct_drafts")
    if not verify:
        return 0, 0
    return result.output_len if correct is None else verify + correct, verify


def speculation_of(results: Iterable[RequestResult]) -> Speculation:
    """Acceptance over these requests, from their own counters: it lies in 1 ... K + 1."""
    committed = steps = 0
    histogram: list[int] = []
    for result in results:
        more, verify = committed_and_steps(result)
        committed, steps = committed + more, steps + verify
        counts = result.meta_info.get("spec_correct_drafts_histogram") or ()
        histogram += [0] * (len(counts) - len(histogram))
        for position, count in enumerate(counts):
            histogram[position] += count
    if not steps:
        return Speculation()
    return Speculation(committed / steps, "requests", tuple(histogram))


def accept_length(results: Iterable[RequestResult]) -> float | None:
    """Tokens committed per verify step over these requests; None without speculation."""
    return speculation_of(results).accept_length


def server_speculation(before: dict, after: dict) -> Speculation:
    """Acceptance between two ``/server_info`` answers, for dialects that carry no counters per request."""

    def state(info: dict) -> dict:
        states = info.get("internal_states") or [(info.get("decode") or [{}])[0]]
        return states[0] if isinstance(states[0], dict) else {}

    old, new = state(before), state(after)
    average = new.get("avg_spec_accept_length")
    is_off = "speculative_algorithm" in after and after["speculative_algorithm"] is None
    if is_off or not average:
        return Speculation()
    if "spec_verify_ct" not in new:
        return Speculation(float(average), "server average")
    steps = new["spec_verify_ct"] - old.get("spec_verify_ct", 0)
    tokens = average * new["spec_verify_ct"] - old.get("avg_spec_accept_length", 0.0) * old.get("spec_verify_ct", 0)
    return Speculation(tokens / steps, "server") if steps > 0 else Speculation()


def token_times(results: Iterable[RequestResult]) -> list[float]:
    """Arrival of every token, on the clock of ``start``."""
    times: list[float] = []
    for result in results:
        if result.streamed:
            times += accumulate(result.itl, initial=result.start + result.ttft)
    return times


def peak_output_throughput(times: Sequence[float], begin: float) -> int:
    """Tokens of the fullest one-second bucket of a grid that starts at ``begin``."""
    return max(Counter(math.floor(moment - begin) for moment in times).values(), default=0)


def peak_band(times: Sequence[float], begin: float) -> tuple[int, int]:
    """Least and greatest peak over shifts of the grid by hundredths of a second."""
    moments = np.asarray(times, dtype=np.float64) - begin
    if not len(moments):
        return 0, 0
    shifts = (np.arange(_PHASES) / _PHASES)[:, None]
    peaks = [int(np.bincount(row).max()) for row in np.floor(moments[None] + shifts).astype(np.int64)]
    return min(peaks), max(peaks)


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
    streamed = [result for result in done if result.streamed]
    inputs = [server_input_len(result) for result in done]
    total_in, total_out = sum(inputs), sum(result.output_len for result in done)
    tpots = [tpot for tpot in map(time_per_output_token, done) if tpot is not None]
    times, begin = token_times(done), min((result.start for result in done), default=0.0)

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
        peak_output_throughput=peak_output_throughput(times, begin),
        peak_band=peak_band(times, begin),
        peak_concurrent_requests=peak_concurrent_requests(done),
        concurrency=per_second(sum(result.latency for result in done)),
        cached_tokens=sum(result.meta_info.get("cached_tokens") or 0 for result in done),
        speculation=speculation_of(done),
        e2e_latency=Distribution.of_seconds([result.latency for result in done]),
        ttft=Distribution.of_seconds([result.ttft for result in streamed]),
        tpot=Distribution.of_seconds(tpots),
        itl=Distribution.of_seconds([gap for result in done for gap in result.itl]),
    )
