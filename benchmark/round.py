"""The rank-shaped decode round on one GPU: what each row costs, node by node, against the bandwidth floor.

    python benchmark/round.py --tp-shape 4 --output benchmark/results/h200/round.json
    python benchmark/round.py --tp-shape 4 --quick          # the headline rows only

Rows are run through the engine's own worker, graphs, result copies and one-step-late reads; acceptance is simulated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import torch
from node_table import BF16, Machine, node_rows, profile_graphs
from rank_shape import build_runner, fill_context, greedy_step, rank_config, set_length

from sgling.srt.core.step import PrefillInput, StepInput
from sgling.srt.layers import moe
from sgling.srt.model_executor.graph_runner import GraphRunner
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PlainWorker
from sgling.srt.speculative.nextn_worker import NextnWorker
from sgling_kernel.sampling import SamplingFlags

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, RAW, SPAN_ROUNDS, PROFILED = 200, 20, 30, 2


class Row(NamedTuple):
    """One line of the table: verify width (1 = plain decode) and the accept length that is simulated."""

    algorithm: str
    width: int
    accept: float


ROWS = (
    Row("plain", 1, 1.0),
    Row("NEXTN", 6, 3.45),
    Row("NEXTN", 5, 3.37),
    Row("NEXTN", 4, 3.11),
    Row("NEXTN", 9, 5.0),
    Row("NEXTN", 17, 9.95),
)
HEADLINE = 2


def calibrate() -> Machine:
    """Time of an empty node in a graph, and copy bandwidth."""
    value, nodes = torch.zeros(32, device="cuda"), 200
    source, target = (torch.empty(2**30, dtype=torch.int8, device="cuda") for _ in range(2))
    value.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            value.add_(1)
    node_us = statistics.median(timed(graph.replay) for _ in range(10)) * 1e3 / nodes
    copy_ms = statistics.median(timed(lambda: target.copy_(source)) for _ in range(20))
    return Machine(node_us, 2 * source.nbytes / copy_ms / 1e6)


def timed(run) -> float:
    """Milliseconds of device time of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Bench:
    """A worker's decode step under graphs, driven as the overlapped scheduler drives it."""

    def __init__(self, runner: ModelRunner, row: Row, context: int):
        self.runner, self.row, self.context = runner, row, context
        self.worker = PlainWorker(runner) if row.algorithm == "plain" else NextnWorker(runner)
        runner.simulated_accept = None if row.algorithm == "plain" else row.accept
        self.graphs = GraphRunner(runner, self.worker, [1], [row.width])
        self.graphs.capture([SamplingFlags()])
        self.step: StepInput = greedy_step(runner, row.width)
        self._pending = None

    def round(self) -> None:
        """Launch one step, then take the previous step's result."""
        self.runner.begin_step(self.row.width)
        launched = self.runner.copy_result(self.graphs.decode(self.step))
        if self._pending is not None:
            self._pending.wait()
        self._pending = launched

    def drain(self) -> None:
        """Take the last result."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None
        torch.cuda.synchronize()

    def rounds(self, count: int) -> list[float]:
        """Milliseconds from start to start of ``count`` consecutive rounds."""
        set_length(self.runner, self.context)
        for _ in range(10):
            self.round()
        self.runner.device_clock.reset()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for mark in marks[:-1]:
            mark.record()
            self.round()
        marks[-1].record()
        self.drain()
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]

    def spans(self) -> dict[str, float]:
        """Median milliseconds of each graph in an unbroken sequence of rounds."""
        set_length(self.runner, self.context)
        marks = []
        for _ in range(SPAN_ROUNDS):
            for name, graph in self.graphs.replays(1, self.row.width, SamplingFlags()):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                marks.append((name, start, end))
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for name, start, end in marks:
            times.setdefault(name, []).append(start.elapsed_time(end))
        return {name: statistics.median(values) for name, values in times.items()}

    def launch_us(self) -> float:
        """Median host time to enqueue a step with nothing queued before it (a full queue would make the host wait)."""
        times = []
        for _ in range(RAW):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.graphs.decode(self.step)
            times.append(time.perf_counter() - begin)
        return 1e6 * statistics.median(times)

    def distinct_experts(self) -> list[int]:
        """Distinct routed experts of each MoE layer of one verify (eager), target layers only."""
        counts, true = [], moe.grouped_topk

        def recorded(*args):
            weights, ids = true(*args)
            counts.append(ids.unique().numel())
            return weights, ids

        set_length(self.runner, self.context)
        moe.grouped_topk = recorded
        try:
            (self.worker.decode if self.row.width == 1 else self.worker.verify)(self.step)
        finally:
            moe.grouped_topk = true
        return counts


def step_bytes(runner: ModelRunner, row: Row, context: int, distinct: float) -> float:
    """Bytes one verify must move: every weight it touches once, states and caches."""
    config = runner.model_config
    expert = 3 * config.moe_intermediate_size * config.hidden_size * BF16
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    unused = len(layers) * (config.num_experts - distinct) * expert
    nextn = (config.num_experts + 1) * expert + 2 * config.hidden_size**2 * BF16
    embedding = config.vocab_size * config.hidden_size * BF16
    states = runner.pools.state.temporal[:, 1].nbytes * (2 if row.width == 1 else 1)
    cache = len(config.mla_layer_ids) * context * config.kv_row_dim * BF16
    return runner.load_report.weight_bytes - unused - nextn - embedding + states + cache


def measure(runner: ModelRunner, row: Row, context: int, machine: Machine, quick: bool) -> dict:
    """Everything about one row."""
    bench = Bench(runner, row, context)
    times = bench.rounds(ROUNDS)
    clock = runner.device_clock
    host = {"run_ahead": clock.run_ahead, "clock_idle_share": clock.idle_share, "launch_us": bench.launch_us()}
    round_ms = statistics.mean(times)
    spans = bench.spans()
    distinct = bench.distinct_experts()
    mean_distinct = statistics.mean(distinct)
    size = step_bytes(runner, row, context, mean_distinct)
    result = {
        "algorithm": row.algorithm,
        "steps": row.width - 1,
        "width": row.width,
        "accept": row.accept,
        "context": context,
        "round_ms": round_ms,
        "median_ms": statistics.median(times),
        "spans_ms": spans,
        "verify_ms": spans.get("verify", spans.get("decode")),
        "bytes": size,
        "floor_ms": size / machine.copy_gbps / 1e6,
        "idle_share": (round_ms - sum(spans.values())) / round_ms,
        "distinct_experts": {"mean": mean_distinct, "min": min(distinct), "max": max(distinct)},
        "raw_ms": times[:RAW],
        "capture_s": bench.graphs.report.seconds,
        "graph_pool_gb": bench.graphs.report.pool_bytes / 1e9,
        **host,
    }
    if not quick:
        result["nodes"] = nodes(bench, mean_distinct, machine)
    return result


def nodes(bench: Bench, distinct: float, machine: Machine) -> dict[str, list[dict]]:
    """Node table of each graph of the round."""
    set_length(bench.runner, bench.context)
    replays = bench.graphs.replays(1, bench.row.width, SamplingFlags())

    def run() -> None:
        for _, graph in replays:
            graph.replay()

    run()
    launches = profile_graphs(run, PROFILED)
    tables = {}
    for i, (name, _) in enumerate(replays):
        rows = 1 if name == "draft" else bench.row.width
        shape = (rows, bench.context, distinct if rows > 1 or name == "decode" else 8.0)
        own = launches[i :: len(replays)]
        tables[name] = node_rows(own, bench.runner.model_config, shape, machine) if own else []
    return tables


def prefill_seconds(runner: ModelRunner, tokens: int) -> list[float]:
    """Wall seconds of three whole prompts of ``tokens``, NEXTN layer included; the first one compiles."""
    worker, seconds = NextnWorker(runner), []
    ids = torch.randint(0, runner.model_config.vocab_size, (tokens,)).tolist()
    for _ in range(3):
        runner.pools.state.clear(1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        worker.prefill(PrefillInput(1, 1, ids, 0, None, SamplingFlags(), None, None))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def sources_sha256() -> str:
    """Hash of the engine's and the operators' sources."""
    digest = hashlib.sha256()
    for tree in ("python/sgling/srt", "sgl-kernel/sgling_kernel", "benchmark"):
        for path in sorted((ROOT / tree).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def commit() -> str | None:
    """The checked-out commit, None outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp-shape", type=int, default=4, help="ranks whose one share this GPU holds")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="cut the model, for smoke runs")
    parser.add_argument("--quick", action="store_true", help="headline rows, no node table")
    parser.add_argument("--prefill", type=int, help="also time prompts of this many tokens")
    parser.add_argument("--output", type=Path, help="JSON file; rewritten after every row")
    return parser.parse_args()


def main() -> None:
    """Run the rows and print the table."""
    args = parse()
    begin = time.perf_counter()
    runner = build_runner(rank_config(args.tp_shape, args.layers), args.context, "cuda")
    machine = calibrate()
    report = {
        "commit": commit(),
        "sources_sha256": sources_sha256(),
        "gpu": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "tp_shape": args.tp_shape,
        "layers": runner.model_config.num_hidden_layers,
        "copy_gbps": machine.copy_gbps,
        "node_us": machine.node_us,
        "load_s": runner.load_report.seconds,
        "start_s": time.perf_counter() - begin,
        "rows": [],
    }
    with torch.inference_mode(), runner.on_forward_stream():
        fill_context(runner)
        for row in ROWS[:HEADLINE] if args.quick else ROWS:
            result = measure(runner, row, args.context, machine, args.quick)
            report["rows"].append(result)
            show(result)
            save(report, args.output)
        if args.prefill:
            report["prefill"] = {"tokens": args.prefill, "seconds": prefill_seconds(runner, args.prefill)}
            print("prefill", report["prefill"], flush=True)
    save(report, args.output)


def show(result: dict) -> None:
    """One line per row."""
    spans = " ".join(f"{name} {ms:.3f}" for name, ms in result["spans_ms"].items())
    print(
        f"{result['algorithm']:6s} width {result['width']:2d}: round {result['round_ms']:.3f} ms ({spans}), floor "
        f"{result['floor_ms']:.3f}, idle {100 * result['idle_share']:.1f} %, ahead {result['run_ahead']:.2f}, launch "
        f"{result['launch_us']:.0f} us, distinct {result['distinct_experts']['mean']:.1f}",
        flush=True,
    )


def save(report: dict, path: Path | None) -> None:
    """Write the report so far."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
