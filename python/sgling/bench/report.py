"""Shows run metrics: upstream's printed table and its JSONL record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from sgling.bench.client import RequestResult
from sgling.bench.metrics import STATISTICS, Distribution, RunMetrics, server_input_len
from sgling.srt.config.bench_args import BenchServingArgs

_BLOCKS = (
    ("e2e_latency", "End-to-End Latency", "E2E Latency"),
    ("ttft", "Time to First Token", "TTFT"),
    ("tpot", "Time per Output Token (excl. 1st token)", "TPOT"),
    ("itl", "Inter-Token Latency", "ITL"),
)
_LABEL, _VALUE, _WIDTH = 40, 10, 51


def _row(label: str, value) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{_LABEL}} {shown:<{_VALUE}}".rstrip()


def _distribution_rows(name: str, sample: Distribution, with_max: bool) -> Iterator[str]:
    for statistic in ("mean", "median", "p90", "p95", "p99", *(("max",) if with_max else ())):
        yield _row(f"{statistic.capitalize()} {name} (ms):", getattr(sample, statistic))


def format_table(args: BenchServingArgs, metrics: RunMetrics) -> str:
    """The table upstream prints, row by row; "-" stands for a figure that does not exist."""
    rows = [
        f"{' Serving Benchmark Result ':=^{_WIDTH}}",
        _row("Backend:", args.backend),
        _row("Traffic request rate:", args.request_rate),
        _row("Max request concurrency:", args.max_concurrency or "not set"),
        _row("Successful requests:", metrics.completed),
        *([_row("Failed requests:", metrics.failed)] if metrics.failed else []),
        _row("Benchmark duration (s):", metrics.duration),
        _row("Total input tokens:", metrics.total_input_tokens),
        _row("Total input text tokens:", metrics.total_input_tokens),
        _row("Total generated tokens:", metrics.total_output_tokens),
        _row("Total generated tokens (retokenized):", metrics.total_output_tokens_retokenized),
        _row("Request throughput (req/s):", metrics.request_throughput),
        _row("Input token throughput (tok/s):", metrics.input_throughput),
        _row("Output token throughput (tok/s):", metrics.output_throughput),
        _row("Peak output token throughput (tok/s):", float(metrics.peak_output_throughput)),
        _row("Peak concurrent requests:", metrics.peak_concurrent_requests),
        _row("Total token throughput (tok/s):", metrics.total_throughput),
        _row("Concurrency:", metrics.concurrency),
    ]
    if metrics.accept_length is not None:
        rows.append(_row("Accept length:", metrics.accept_length))
    for name, title, short in _BLOCKS:
        rows.append(f"{title:-^{_WIDTH}}")
        rows += _distribution_rows(short, getattr(metrics, name), name == "itl")
    return "\n".join([*rows, "=" * _WIDTH])


def length_warning(metrics: RunMetrics, results: Sequence[RequestResult]) -> str | None:
    """Says so when the server counted other prompt lengths than were asked."""
    off = sum(result.success and server_input_len(result) != result.input_len for result in results)
    if not off or metrics.input_lens is None:
        return None
    mean, low, high = metrics.input_lens
    return f"{off} prompts are not of the asked length; the server counted mean {mean:.1f}, min {low}, max {high}"


def json_record(
    args: BenchServingArgs, metrics: RunMetrics, server_info: dict, results: Sequence[RequestResult]
) -> dict:
    """One line of the output file, upstream's keys; figures that do not exist are null."""
    asked = ("tag", "backend", "dataset_name", "request_rate", "max_concurrency")
    lengths = ("random_input_len", "random_output_len", "random_range_ratio")
    record = {name: getattr(args, name) for name in asked}
    record |= {"sharegpt_output_len": None, **{name: getattr(args, name) for name in lengths}}
    if args.request_rate == float("inf"):
        record["request_rate"] = "inf"
    record |= {
        "server_info": server_info,
        "duration": metrics.duration,
        "completed": metrics.completed,
        "total_input_tokens": metrics.total_input_tokens,
        "total_input_text_tokens": metrics.total_input_tokens,
        "total_input_vision_tokens": 0,
        "total_output_tokens": metrics.total_output_tokens,
        "total_output_tokens_retokenized": metrics.total_output_tokens_retokenized,
        "request_throughput": metrics.request_throughput,
        "input_throughput": metrics.input_throughput,
        "output_throughput": metrics.output_throughput,
        "total_throughput": metrics.total_throughput,
    }
    for name, _, _ in _BLOCKS:
        record |= {f"{stat}_{name}_ms": getattr(getattr(metrics, name), stat) for stat in STATISTICS}
    record |= {
        "concurrency": metrics.concurrency,
        "accept_length": metrics.accept_length,
        "max_output_tokens_per_s": metrics.peak_output_throughput,
        "max_concurrent_requests": metrics.peak_concurrent_requests,
    }
    return record | (_details(results) if args.output_details else {})


def _details(results: Sequence[RequestResult]) -> dict:
    return {
        "input_lens": [server_input_len(result) for result in results],
        "output_lens": [result.output_len for result in results],
        "ttfts": [result.ttft for result in results],
        "itls": [result.itl for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error for result in results],
    }


def output_path(args: BenchServingArgs, now: datetime) -> Path:
    """Where the record goes: ``--output-file``, else upstream's ``{backend}_{MMDD}_{num}_{in}_{out}.jsonl``."""
    lengths = f"{args.random_input_len}_{args.random_output_len}"
    return Path(args.output_file or f"{args.backend}_{now:%m%d}_{args.num_prompts}_{lengths}.jsonl")


def append_record(path: Path, record: dict) -> None:
    """Append one JSON line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
