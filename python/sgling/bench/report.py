"""Shows a run: upstream's printed table and JSONL record, and what they have no place for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sgling import __version__
from sgling.bench.metrics import (
    STATISTICS,
    Distribution,
    RunMetrics,
    Speculation,
    committed_and_steps,
    compute_metrics,
    server_input_len,
    time_per_output_token,
)
from sgling.bench.result import RequestResult
from sgling.bench.workload import RANDOM_LABEL
from sgling.srt.config.bench_args import BenchServingArgs

_BLOCKS = (
    ("e2e_latency", "End-to-End Latency", "E2E Latency"),
    ("ttft", "Time to First Token", "TTFT"),
    ("tpot", "Time per Output Token (excl. 1st token)", "TPOT"),
    ("itl", "Inter-Token Latency", "ITL"),
)
_LABEL, _VALUE, _WIDTH = 40, 10, 50


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
    if metrics.speculation.accept_length is not None:
        rows.append(_row("Accept length:", metrics.speculation.accept_length))
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


def _labels(results: Sequence[RequestResult]) -> list[str]:
    """Scenario names of a mixed run, in order of appearance; none when all prompts are of one kind."""
    labels = list(dict.fromkeys(result.label for result in results))
    return labels if len(labels) > 1 else []


def by_label(results: Sequence[RequestResult], duration: float) -> dict[str, RunMetrics]:
    """Figures per scenario of a mixed run."""
    return {
        label: compute_metrics([result for result in results if result.label == label], duration)
        for label in _labels(results)
    }


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def speculation_lines(spec: Speculation) -> Iterator[str]:
    """Acceptance by number of drafts and by position."""
    if spec.accept_length is None:
        yield "Speculation: off, or not reported by this server"
        return
    if spec.source != "requests":
        what = "the server's counters over this run" if spec.source == "server" else "a server average, earlier traffic"
        yield f"Accept length is from {what}; this dialect carries no counters per request"
    if total := sum(spec.histogram):
        shares = "  ".join(f"{i}: {count / total:.1%}" for i, count in enumerate(spec.histogram))
        yield f"Accepted drafts per step:  {shares}"
        rates = "  ".join(f"{i}: {_shown(rate)}" for i, rate in enumerate(spec.position_rates, 1))
        yield f"Acceptance by position:    {rates}"


def format_extras(run: Any) -> str:
    """Lines under the table: labels, speculation, the peak's band, the cache, scenarios, prompt lengths."""
    metrics, low, high = run.metrics, *run.metrics.peak_band
    lines = [f"Prefix cache: {run.cache_state} run, {metrics.cached_tokens} prompt tokens cached"]
    if run.args.is_random and metrics.speculation.accept_length is not None:
        lines.append(f"Label: {RANDOM_LABEL}")
    lines += speculation_lines(metrics.speculation)
    lines.append(f"Peak output over all phases of the one-second grid: {low} to {high} tok/s (never compare peaks)")
    for label, part in by_label(run.results, metrics.duration).items():
        accept = _shown(part.speculation.accept_length)
        lines.append(f"  {label}: {part.completed} ok, accept length {accept}, mean TPOT {_shown(part.tpot.mean)} ms")
    estimated = sum(result.success and result.len_estimated for result in run.results)
    if estimated:
        lines.append(f"{estimated} answers came without token counts: theirs are estimates by the client's tokenizer")
    if warning := length_warning(metrics, run.results):
        lines.append(warning)
    return "\n".join(lines)


def json_record(run: Any) -> dict:
    """One line of the output file, upstream's keys; figures that do not exist are null. ``sgling`` holds our own."""
    args, metrics = run.args, run.metrics
    asked = ("tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len")
    lengths = ("random_input_len", "random_output_len", "random_range_ratio")
    record = {name: getattr(args, name) for name in (*asked, *lengths)}
    if args.request_rate == float("inf"):
        record["request_rate"] = "inf"
    record |= {
        "server_info": run.server_info,
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
        "accept_length": metrics.speculation.accept_length,
        "max_output_tokens_per_s": metrics.peak_output_throughput,
        "max_concurrent_requests": metrics.peak_concurrent_requests,
        "sgling": own_record(run),
    }
    return record | (_details(run.results) if args.output_details else {})


def own_record(run: Any) -> dict:
    """What upstream's record has no key for; ``requests`` is what ``sgling ab`` compares, prompt by prompt."""
    metrics, spec = run.metrics, run.metrics.speculation
    return {
        "version": __version__,
        "cache_state": run.cache_state,
        "label": RANDOM_LABEL if run.args.is_random else None,
        "seed": run.args.seed,
        "failed": metrics.failed,
        "cached_tokens": metrics.cached_tokens,
        "accept_source": spec.source,
        "accept_histogram": list(spec.histogram),
        "accept_rate_by_position": spec.position_rates,
        "peak_band_tokens_per_s": list(metrics.peak_band),
        "scenarios": {
            label: {"accept_length": part.speculation.accept_length, "mean_tpot_ms": part.tpot.mean}
            for label, part in by_label(run.results, metrics.duration).items()
        },
        "requests": [request_record(result) for result in run.results],
    }


def request_record(result: RequestResult) -> dict:
    """One request as ``sgling ab`` needs it; ``tpot_ms`` is null where there is none."""
    tpot, (committed, steps) = time_per_output_token(result) if result.success else None, committed_and_steps(result)
    return {"tpot_ms": None if tpot is None else tpot * 1000, "committed": committed, "verify_steps": steps}


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
    if args.output_file:
        return Path(args.output_file)
    kind = args.dataset_name
    if kind.startswith("random"):
        kind = f"{args.random_input_len}_{args.random_output_len}"
    return Path(f"{args.backend}_{now:%m%d}_{args.num_prompts}_{kind}.jsonl")


def append_record(path: Path, record: dict) -> None:
    """Append one JSON line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
