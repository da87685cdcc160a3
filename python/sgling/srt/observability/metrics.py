"""Prometheus metrics of the HTTP process, under upstream's names (prefix ``sglang:``), for ``/metrics``.

The HTTP process feeds one :class:`ServerMetrics`: tokens as they stream, each request when it ends, and the scheduler's
state when scraped. Everything lives in a registry of its own, so several servers in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_TTFT_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_ITL_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8)
_E2E_BUCKETS = (0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)

# gauge -> key of the scheduler's internal state that feeds it
_GAUGES = {
    "num_running_reqs": "num_running_reqs",
    "num_queue_reqs": "num_queue_reqs",
    "num_used_tokens": "kv_used_tokens",
    "kv_available_tokens": "kv_available_tokens",
    "token_usage": "token_usage",
    "gen_throughput": "last_gen_throughput",
    "spec_accept_length": "avg_spec_accept_length",
    "spec_accept_rate": "spec_accept_rate",
    "max_total_num_tokens": "max_total_num_tokens",
    "device_run_ahead": "device_run_ahead",
    "device_idle_share": "device_idle_share",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests.",
    "generation_tokens": "Generated tokens of finished requests.",
    "cached_tokens": "Prompt tokens of finished requests that a prefix cache served.",
    "num_requests": "Finished requests.",
    "num_aborted_requests": "Finished requests that were aborted.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", _TTFT_BUCKETS),
    "inter_token_latency_seconds": ("Gap between two tokens; a chunk's gap is split over its tokens.", _ITL_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival to last token.", _E2E_BUCKETS),
}


class FinishedRequest(NamedTuple):
    """What is known of a request when it ends; times in seconds, None = there was no token."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    time_to_first_token: float | None
    e2e_latency: float
    aborted: bool = False


class ServerMetrics:
    """All metrics of one server.

    ``labels`` are put on every series, e.g. ``{"model_name": "ling3-pico", "engine_type": "unified", "tp_rank": "0"}``.
    """

    def __init__(self, labels: Mapping[str, str]):
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry(auto_describe=True)
        names = tuple(labels)

        def series(kind, name, text, **options):
            metric = kind(f"sglang:{name}", text, labelnames=names, registry=self._registry, **options)
            return metric.labels(**labels) if names else metric

        self._gauges = {name: series(Gauge, name, f"Scheduler: {name}.") for name in _GAUGES}
        self._counters = {name: series(Counter, name, text) for name, text in _COUNTERS.items()}
        self._histograms = {
            name: series(Histogram, name, text, buckets=buckets) for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def observe_inter_token(self, gap: float, tokens: int) -> None:
        """Book the arrival of ``tokens`` further tokens ``gap`` seconds after the previous arrival of a request."""
        for _ in range(tokens):
            self._histograms["inter_token_latency_seconds"].observe(gap / tokens)

    def observe_request(self, request: FinishedRequest) -> None:
        """Book a request that ended."""
        self._counters["num_requests"].inc()
        if request.aborted:
            self._counters["num_aborted_requests"].inc()
        self._counters["prompt_tokens"].inc(request.prompt_tokens)
        self._counters["generation_tokens"].inc(request.completion_tokens)
        self._counters["cached_tokens"].inc(request.cached_tokens)
        if request.time_to_first_token is not None:
            self._histograms["time_to_first_token_seconds"].observe(request.time_to_first_token)
        self._histograms["e2e_request_latency_seconds"].observe(request.e2e_latency)

    def update_from_state(self, state: Mapping) -> None:
        """Set the gauges from the scheduler's internal state; a key that is absent or None leaves its gauge alone."""
        for name, key in _GAUGES.items():
            value = state.get(key)
            if value is not None:
                self._gauges[name].set(value)

    def render(self) -> tuple[bytes, str]:
        """(body, content type) of ``/metrics``."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST
