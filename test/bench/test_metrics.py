"""Run metrics against numbers worked out by hand, and the odd runs: one token, failures, nothing at all."""

from __future__ import annotations

import json
from datetime import datetime

import numpy as np
import pytest

from sgling.bench.metrics import (
    STATISTICS,
    Distribution,
    RunMetrics,
    Speculation,
    accept_length,
    accept_length_of,
    compute_metrics,
    peak_band,
    server_speculation,
    tpot_of,
)
from sgling.bench.report import append_record, format_extras, format_table, json_record, length_warning, output_path
from sgling.bench.result import RequestResult
from sgling.bench.serving import Run
from sgling.bench.workload import RANDOM_LABEL
from sgling.srt.config.bench_args import BenchServingArgs

NOTHING = Distribution(*[None] * 7)


def run_of(args: BenchServingArgs, metrics: RunMetrics, results: list[RequestResult], info: dict | None = None) -> Run:
    return Run("default", args, metrics, results, info or {})


def result(start: float, ttft: float, itl: list[float], latency: float | None = None, **meta) -> RequestResult:
    """A successful request of 1 + len(itl) tokens and 10 prompt tokens."""
    return RequestResult(
        input_len=10,
        requested_output_len=1 + len(itl),
        success=True,
        start=start,
        ttft=ttft,
        latency=ttft + sum(itl) if latency is None else latency,
        itl=itl,
        output_len=1 + len(itl),
        meta_info={"prompt_tokens": 10, **meta},
    )


def test_two_requests_by_hand():
    first = result(100.0, 0.2, [0.1, 0.1, 0.3, 0.1], latency=0.8, spec_verify_ct=2, spec_num_correct_drafts=2)
    second = result(100.8, 0.4, [0.2], latency=0.6, spec_verify_ct=1, spec_num_correct_drafts=0)
    metrics = compute_metrics([first, second], duration=2.0, retokenized=7)
    assert (metrics.completed, metrics.failed) == (2, 0)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (20, 7)
    assert (metrics.request_throughput, metrics.input_throughput) == (1.0, 10.0)
    assert (metrics.output_throughput, metrics.total_throughput) == (3.5, 13.5)
    assert metrics.concurrency == pytest.approx(1.4 / 2)
    assert metrics.speculation.accept_length == pytest.approx(5 / 3)  # (2 + 2) + (1 + 0) tokens in 3 verify steps
    assert metrics.ttft.mean == pytest.approx(300)
    assert metrics.ttft.std == pytest.approx(100)
    assert metrics.e2e_latency.median == pytest.approx(700)
    assert metrics.tpot.mean == pytest.approx((150 + 200) / 2)  # (0.8 - 0.2) / 4 and (0.6 - 0.4) / 1 seconds
    assert metrics.itl.mean == pytest.approx(160)  # 0.8 s over 5 gaps, both requests pooled
    assert metrics.itl.max == pytest.approx(300)
    assert metrics.itl.p90 == pytest.approx(np.percentile([100, 100, 300, 100, 200], 90))
    # bucket 0 (100.0 to 101.0): all five of the first (last at 100.8); bucket 1: both of the second (101.2, 101.4)
    assert metrics.peak_output_throughput == 5
    assert metrics.peak_concurrent_requests == 2  # the second starts in bucket 0 too
    assert metrics.input_lens == (10, 10, 10)


def test_percentiles_are_linear():
    sample = Distribution.of_seconds([0.001 * i for i in range(1, 11)])
    assert (sample.p90, sample.p95, sample.p99) == pytest.approx((9.1, 9.55, 9.91))
    assert (sample.mean, sample.median, sample.max) == pytest.approx((5.5, 5.5, 10))


def test_buckets_are_fixed_not_sliding():
    # tokens at 0.9, 0.95 | 1.0, 1.05: a sliding second would see four
    metrics = compute_metrics([result(0.0, 0.9, [0.05, 0.05, 0.05])], duration=1.1)
    assert metrics.peak_output_throughput == 2


def test_single_token_outputs_have_no_tpot_and_no_itl():
    metrics = compute_metrics([result(0.0, 0.5, []), result(0.5, 0.5, [])], duration=1.0)
    assert metrics.tpot == metrics.itl == NOTHING
    assert metrics.output_throughput == 2
    assert metrics.speculation.accept_length is None


def test_failures_count_nowhere_but_in_failed():
    failed = RequestResult(10, 5, error="ConnectionError: refused", start=0.0)
    metrics = compute_metrics([failed, result(0.0, 0.5, [0.5])], duration=1.0)
    assert (metrics.completed, metrics.failed, metrics.total_output_tokens) == (1, 1, 2)
    assert metrics.ttft.mean == pytest.approx(500)


@pytest.mark.parametrize("results", [[], [RequestResult(10, 5, error="x")]])
@pytest.mark.parametrize("duration", [0.0, 1.0])
def test_empty_runs(results, duration):
    metrics = compute_metrics(results, duration)
    assert metrics.completed == metrics.peak_output_throughput == metrics.peak_concurrent_requests == 0
    assert metrics.output_throughput == metrics.concurrency == 0
    assert metrics.ttft == metrics.e2e_latency == NOTHING
    assert metrics.input_lens is None
    args = BenchServingArgs.from_cli([])
    assert "Mean TTFT (ms):" in format_table(args, metrics)
    assert json.loads(json.dumps(json_record(run_of(args, metrics, results)), allow_nan=False))["mean_ttft_ms"] is None


def test_accept_length_is_of_these_requests():
    assert accept_length([result(0, 1, [1] * 7, spec_verify_ct=2, spec_num_correct_drafts=6)]) == 4
    assert accept_length([result(0, 1, [1] * 7, spec_verify_ct=4)]) == 2  # no draft counts: 8 tokens / 4 steps
    assert accept_length([result(0, 1, [1] * 7)]) is None
    assert accept_length([]) is None


def test_table_rows_in_upstream_order():
    args = BenchServingArgs.from_cli(["--max-concurrency", "1"])
    metrics = compute_metrics([result(0.0, 0.5, [0.5], spec_verify_ct=1, spec_num_correct_drafts=0)], 1.0, 2)
    labels = [line.split(":")[0].strip("-") for line in format_table(args, metrics).splitlines()[1:-1]]
    blocks = (
        ("End-to-End Latency", "E2E Latency"),
        ("Time to First Token", "TTFT"),
        ("Time per Output Token (excl. 1st token)", "TPOT"),
        ("Inter-Token Latency", "ITL"),
    )
    expected = [
        *("Backend", "Traffic request rate", "Max request concurrency", "Successful requests"),
        *("Benchmark duration (s)", "Total input tokens", "Total input text tokens", "Total generated tokens"),
        *("Total generated tokens (retokenized)", "Request throughput (req/s)", "Input token throughput (tok/s)"),
        *("Output token throughput (tok/s)", "Peak output token throughput (tok/s)", "Peak concurrent requests"),
        *("Total token throughput (tok/s)", "Concurrency", "Accept length"),
    ]
    for title, name in blocks:
        expected += [title, *(f"{stat} {name} (ms)" for stat in ("Mean", "Median", "P90", "P95", "P99"))]
    assert labels == [*expected, "Max ITL (ms)"]


def test_accept_row_is_absent_without_speculation():
    metrics = compute_metrics([result(0.0, 0.5, [0.5])], 1.0)
    assert "Accept length" not in format_table(BenchServingArgs.from_cli([]), metrics)


def test_record_has_upstream_keys_and_is_appended(tmp_path):
    args = BenchServingArgs.from_cli(["--output-details", "--output-file", str(tmp_path / "out.jsonl")])
    results = [result(0.0, 0.5, [0.5])]
    record = json_record(run_of(args, compute_metrics(results, 1.0, 2), results, {"version": "x"}))
    plain = ["tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len"]
    plain += ["random_input_len", "random_output_len", "random_range_ratio"]
    plain += ["server_info", "duration", "completed", "total_input_tokens"]
    plain += ["total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens"]
    plain += ["total_output_tokens_retokenized", "request_throughput", "input_throughput", "output_throughput"]
    plain += ["total_throughput", "concurrency", "accept_length", "max_output_tokens_per_s", "max_concurrent_requests"]
    stats = [f"{stat}_{name}_ms" for name in ("e2e_latency", "ttft", "tpot", "itl") for stat in STATISTICS]
    details = ["input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"]
    assert set(record) == {*plain, *stats, *details, "sgling"}
    path = output_path(args, datetime.now())
    append_record(path, record)
    append_record(path, record)
    assert [json.loads(line)["duration"] for line in path.read_text().splitlines()] == [1.0, 1.0]


def test_default_output_name():
    args = BenchServingArgs.from_cli("--num-prompts 8 --random-input-len 64 --random-output-len 32".split())
    assert str(output_path(args, datetime(2024, 3, 9))) == "sglang_0309_8_64_32.jsonl"


def test_wrong_prompt_lengths_are_reported():
    exact, off = result(0, 1, []), result(0, 1, [])
    off.meta_info["prompt_tokens"] = 13
    metrics = compute_metrics([exact, off], 1.0)
    assert metrics.total_input_tokens == 23
    assert "mean 11.5, min 10, max 13" in length_warning(metrics, [exact, off])
    assert length_warning(compute_metrics([exact], 1.0), [exact]) is None


def test_acceptance_by_position_by_hand():
    # 10 steps: 4 accepted no draft, 3 one, 1 two, 2 three
    one = result(0, 1, [1], spec_verify_ct=6, spec_num_correct_drafts=4, spec_correct_drafts_histogram=[3, 2, 1])
    two = result(0, 1, [1], spec_verify_ct=4, spec_num_correct_drafts=7, spec_correct_drafts_histogram=[1, 1, 0, 2])
    spec = compute_metrics([one, two], 1.0).speculation
    assert spec == Speculation(21 / 10, "requests", (4, 3, 1, 2))
    assert spec.position_rates == pytest.approx([6 / 10, 3 / 6, 2 / 3])
    assert Speculation(1.0, "requests", (5, 0, 0)).position_rates == [0.0, None]
    assert Speculation().position_rates == []


def test_tpot_and_accept_length_of_counts():
    assert tpot_of(1.1, 0.1, 11) == pytest.approx(0.1)
    assert tpot_of(1.0, 1.0, 1) is None
    assert accept_length_of(4, 6) == 2.5
    assert accept_length_of(0, 0) is None


def test_peak_band_shows_what_the_phase_does():
    # four tokens in half a second around a border of the grid, one alone: 2 + 2 | as it lies, 4 when shifted
    times = [0.8, 0.9, 1.0, 1.1, 3.5]
    assert peak_band(times, 0.0) == (2, 4)
    assert peak_band([], 0.0) == (0, 0)
    assert peak_band([5.0], 5.0) == (1, 1)


def info(average: float, steps: int | None = None, **more) -> dict:
    state = {"avg_spec_accept_length": average} | ({} if steps is None else {"spec_verify_ct": steps})
    return {"internal_states": [state], **more}


def test_accept_length_of_the_server_is_that_of_the_run_where_it_counts_steps():
    # 100 steps at 2.0 before; 150 at 2.4 in all: the run committed 360 - 200 tokens in 50 steps
    assert server_speculation(info(2.0, 100), info(2.4, 150)) == Speculation(pytest.approx(3.2), "server")
    assert server_speculation({}, info(2.5)) == Speculation(2.5, "server average")
    assert server_speculation({}, {"decode": [info(2.0)["internal_states"][0]]}).accept_length == 2.0
    assert server_speculation({}, info(1.0, 9, speculative_algorithm=None)) == Speculation()
    assert server_speculation({}, {}) == server_speculation(info(2.0, 5), info(2.0, 5)) == Speculation()


def test_extras_label_random_prompts_and_show_scenarios():
    results = [result(0, 1, [1], spec_verify_ct=1, spec_num_correct_drafts=0) for _ in range(2)]
    results[0].label, results[1].label = "coding", "zh_chat"
    metrics = compute_metrics(results, 1.0)
    shown = format_extras(run_of(BenchServingArgs.from_cli([]), metrics, results))
    assert RANDOM_LABEL in shown
    assert "coding: 1 ok, accept length 1.00, mean TPOT 1000.00 ms" in shown
    shown = format_extras(run_of(BenchServingArgs.from_cli(["--dataset-name", "scenarios"]), metrics, results))
    assert RANDOM_LABEL not in shown
    plain = compute_metrics([result(0, 1, [1])], 1.0)
    assert "Speculation: off" in format_extras(run_of(BenchServingArgs.from_cli([]), plain, []))
