"""The rank-shaped decode round on one GPU: what each row costs, node by node, against the bandwidth floor.

    python benchmark/round.py --tp-shape 4 --output benchmark/results/h200/round.json
    python benchmark/round.py --tp-shape 4 --quick          # the headline rows only
    python benchmark/round.py --tp-shape 4 --quick --prefill 8192
    python benchmark/round.py --tp-shape 4 --algorithm DSPARK    # blocks of 8 and 16; "all" for everything

Rows are run through the engine's own worker, graphs, result copies and one-step-late reads; acceptance is simulated.
Node tables come from rows with the relay of three graphs (and plain decoding), whose parts can be told apart.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch
from drafter_nodes import drafter_nodes
from node_table import BF16, Machine, node_rows, profile_graphs
from prefill_table import measure_prefill
from rank_shape import build_runner, fill_context, rank_config, rank_drafter, set_length
from round_bench import Bench, Row

from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.model_loader.draft_inventory import draft_weight_bytes
from sgling_kernel import cuda, dispatch
from sgling_kernel.timing import copy_gbps, graph_us

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {".py", ".cu", ".cuh", ".h", ".json"}
ROUNDS, RAW, PROFILED = 200, 20, 2
REDUCED_HEAD = 8192  # of the rank's 39,296 ids: 32K listed tokens on four ranks
NODE_TABLES = "three"  # the relay whose graphs are taken apart
ROWS = (
    Row("plain", 1, 1.0),
    Row("NEXTN", 6, 3.45),
    Row("NEXTN", 6, 3.45, relay="three"),
    Row("NEXTN", 6, 3.45, metadata="glue"),
    Row("NEXTN", 6, 3.45, metadata="eager"),
    *(Row("NEXTN", width, accept, relay) for width, accept in ((5, 3.37), (4, 3.11), (9, 5.0), (17, 9.95))
      for relay in ("merged", "three")),
    Row("NEXTN", 6, 3.45, draft_tokens=REDUCED_HEAD),
    Row("NEXTN", 4, 3.11, draft_tokens=REDUCED_HEAD),
    *(Row("DSPARK", 9, accept) for accept in (4.8, 6.2)),
    Row("DSPARK", 9, 4.8, relay="three"),
    *(Row("DSPARK", 17, accept) for accept in (4.8, 6.2, 9.95)),
    Row("DSPARK", 17, 9.95, relay="three"),
)  # fmt: skip
HEADLINE = 3


def calibrate() -> Machine:
    """Time of an empty node in a graph, and copy bandwidth."""
    value, nodes = torch.zeros(32, device="cuda"), 200

    def run() -> None:
        for _ in range(nodes):
            value.add_(1)

    return Machine(graph_us(run, 1, 10) / nodes, copy_gbps())


def step_bytes(runner: ModelRunner, row: Row, context: int, distinct: float) -> float:
    """Bytes one verify must move: every weight it touches once, states and caches."""
    config = runner.model_config
    expert = 3 * config.moe_intermediate_size * config.hidden_size * BF16
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    unused = len(layers) * (config.num_experts - distinct) * expert
    if (drafter := runner.spec.drafter) is not None:
        unused += draft_weight_bytes(drafter, 1, torch.bfloat16)
        nextn = 0
    else:
        nextn = (config.num_experts + 1) * expert + 2 * config.hidden_size**2 * BF16
    embedding = config.vocab_size * config.hidden_size * BF16
    states = runner.pools.state.temporal[:, 1].nbytes * (2 if row.width == 1 else 1)
    cache = len(config.mla_layer_ids) * context * config.kv_row_dim * BF16
    return runner.load_report.weight_bytes - unused - nextn - embedding + states + cache


def measure(runner: ModelRunner, row: Row, context: int, machine: Machine, quick: bool) -> dict:
    """Everything about one row."""
    bench = Bench(runner, row, context)
    times = bench.rounds(ROUNDS)
    clock, launch = runner.device_clock, bench.launch_us()
    host = {"run_ahead": clock.run_ahead, "clock_idle_share": clock.idle_share, "launch_us": launch.pop("step")}
    round_ms = statistics.mean(times)
    spans = bench.spans()
    distinct = bench.distinct_experts()
    mean_distinct = statistics.mean(distinct)
    size = step_bytes(runner, row, context, mean_distinct)
    result = {
        **row._asdict(),
        "steps": row.width - 1,
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
        "first_step_s": bench.first_step_s,
        "capture_s": bench.graphs.report.seconds,
        "graph_pool_gb": bench.graphs.report.pool_bytes / 1e9,
        **host,
        "launch_parts_us": launch,
    }
    if not quick and (row.relay == NODE_TABLES or row.width == 1):
        result["nodes"] = nodes(bench, mean_distinct, machine)
    return result


def nodes(bench: Bench, distinct: float, machine: Machine) -> dict[str, list[dict]]:
    """Node table of each graph of the round."""
    set_length(bench.runner, bench.context)
    replays = bench.replays()

    def run() -> None:
        for _, graph in replays:
            graph.replay()

    run()
    launches = profile_graphs(run, PROFILED)
    tables = {}
    for i, (name, _) in enumerate(replays):
        drafter = bench.runner.spec.drafter
        rows = bench.row.width if name != "draft" else 1 if drafter is None else drafter.block_rows
        one_row = bench.runner.model_config.num_experts_per_tok  # an extend goes on with its last accepted row
        shape = (rows, bench.context, distinct if name in ("verify", "decode") else one_row)
        own, extra = launches[i :: len(replays)], drafter_nodes(drafter, name, bench.context)
        tables[name] = node_rows(own, bench.runner.model_config, shape, machine, extra) if own else []
    return tables


def sources_sha256() -> str:
    """Hash of the engine's and the operators' sources, tables of measured choices included."""
    digest = hashlib.sha256()
    trees = ("python/sgling/srt", "sgl-kernel/sgling_kernel", "benchmark/configs")
    files = (path for tree in trees for path in (ROOT / tree).rglob("*"))
    for path in sorted((*files, *(ROOT / "benchmark").glob("*.py"))):
        if path.suffix in SOURCES:
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
    parser.add_argument("--relay", choices=("both", "merged", "three"), default="both", help="rows of these relays")
    parser.add_argument(
        "--algorithm", choices=("all", "NEXTN", "DSPARK"), default="NEXTN", help="NEXTN: its rows and plain decoding"
    )
    parser.add_argument("--prefill", type=int, help="also time and take apart prompts of this many tokens")
    parser.add_argument("--output", type=Path, help="JSON file; rewritten after every row")
    return parser.parse_args()


def main() -> None:
    """Run the rows and print the table."""
    args = parse()
    begin = time.perf_counter()
    if dispatch.usable("cuda", cuda.why_not()):
        cuda.prebuild()
    built = time.perf_counter()
    config, rows = rank_config(args.tp_shape, args.layers), chosen_rows(args)
    machine = calibrate()
    report = {
        "commit": commit(),
        "sources_sha256": sources_sha256(),
        "gpu": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "tp_shape": args.tp_shape,
        "layers": config["num_hidden_layers"],
        "copy_gbps": machine.copy_gbps,
        "node_us": machine.node_us,
        "cold_start": {"cuda_build_s": built - begin},
        "rows": [],
    }
    for block in dict.fromkeys(row.block for row in rows):
        gc.unfreeze()  # capture froze the previous model
        gc.collect()
        torch.cuda.empty_cache()
        measure_model(args, config, [row for row in rows if row.block == block], machine, report)
    report["cold_start"] |= cold_start(report["rows"])
    print("cold start, seconds:", {name: round(value, 2) for name, value in report["cold_start"].items()}, flush=True)
    save(report, args.output)


def measure_model(args: argparse.Namespace, config: dict, rows: list[Row], machine: Machine, report: dict) -> None:
    """Build the model with the drafter of these rows and add them to the report."""
    started, block = time.perf_counter(), rows[0].block
    drafter = None if block is None else rank_drafter(config, args.tp_shape, block)
    runner = build_runner(config, args.context, "cuda", drafter)
    report["cold_start"].setdefault("runner_s", time.perf_counter() - started)
    report["cold_start"].setdefault("load_s", runner.load_report.seconds)
    with torch.inference_mode(), runner.on_forward_stream():
        fill_context(runner)
        for row in rows:
            result = measure(runner, row, args.context, machine, args.quick)
            report["rows"].append(result)
            show(result)
            save(report, args.output)
        if args.prefill and block is None:
            report["prefill"] = measure_prefill(runner, args.prefill, machine)


def chosen_rows(args: argparse.Namespace) -> list[Row]:
    """Headline rows or all, of the asked algorithm and relays; plain decoding has but one relay."""
    rows = [row for row in ROWS if args.algorithm in ("all", row.algorithm if row.width > 1 else "NEXTN")]
    rows = rows[:HEADLINE] if args.quick and args.algorithm != "DSPARK" else rows
    return [row for row in rows if row.width == 1 or args.relay in ("both", row.relay)]


def cold_start(rows: list[dict]) -> dict[str, float]:
    """Seconds of the first eager step and the first capture of each algorithm: what a server's start adds."""
    figures: dict[str, float] = {}
    for row in rows:
        figures.setdefault(f"first_step_s {row['algorithm']}", row["first_step_s"])
        figures.setdefault(f"capture_s {row['algorithm']}", row["capture_s"])
    return figures


def show(result: dict) -> None:
    """One line per row."""
    spans = " ".join(f"{name} {ms:.3f}" for name, ms in result["spans_ms"].items())
    head = "" if result["draft_tokens"] is None else f", draft head of {result['draft_tokens']} ids"
    print(
        f"{result['algorithm']:6s} width {result['width']:2d} {result['relay']:6s} {result['metadata']:8s}: "
        f"round {result['round_ms']:.3f} ms ({spans}){head}, floor "
        f"{result['floor_ms']:.3f}, idle {100 * result['idle_share']:.1f} %, ahead {result['run_ahead']:.2f}, launch "
        f"{result['launch_us']:.0f} us, distinct {result['distinct_experts']['mean']:.1f}, launch parts "
        + " ".join(f"{name} {us:.0f}" for name, us in result["launch_parts_us"].items()),
        flush=True,
    )


def save(report: dict, path: Path | None) -> None:
    """Write the report so far."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
