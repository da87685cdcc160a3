"""Names the nodes of a profiled step and sets measured time beside bytes and the cost model.

A node's time is the advance of the latest end: launch gap included, overlap with its predecessor excluded. The first
node of a graph counts from its own start: the gap before it is the host's or the launch's, and no node's.

    python benchmark/node_table.py benchmark/results/h200/round.json            # markdown, every row and graph
    python benchmark/node_table.py benchmark/results/h200/round.json --width 6  # the rows of one verify width
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from sgling.srt.config.model_config import ModelConfig

BF16, FP32 = 2, 4
PACKAGE = Path(__file__).resolve().parents[1] / "sgl-kernel" / "sgling_kernel"
# dense products, told apart by grid and predecessor
PRODUCTS = ("sliced_kernel", "whole_kernel", "small_m_kernel", "stream_kernel")


class Kernel(NamedTuple):
    """One kernel of a trace: function name, grid, microseconds since the previous kernel's end."""

    name: str
    grid: tuple[int, ...]
    us: float


class Machine(NamedTuple):
    """Constants calibrated on the machine: microseconds of an empty node, GB/s of a copy (read + written)."""

    node_us: float
    copy_gbps: float


def profile_graphs(run: Callable[[], None], rounds: int, smallest: int = 9) -> list[list[Kernel]]:
    """Kernels of each launch of at least ``smallest`` kernels in ``rounds`` calls of ``run``, in launch order."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    device = sorted((event for event in events if event.get("cat") in kinds), key=lambda event: event["ts"])
    graphs: dict[int, list[Kernel]] = {}
    end = 0.0
    for event in device:
        own = graphs.setdefault(event["args"].get("correlation", -1), [])
        finished = event["ts"] + event["dur"]
        since = max(end, event["ts"] - (20 if own else 0))
        own.append(Kernel(event["name"], tuple(event["args"].get("grid", ())), finished - since))
        end = max(end, finished)
    return [kernels for kernels in graphs.values() if len(kernels) >= smallest]


def function_name(kernel: str) -> str:
    """Name of a kernel without return type, namespace noise, template arguments and parameters."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", name)[0].strip("_ ")[:60]


class Extra(NamedTuple):
    """Names that the target's config does not know: those of a drafter's graphs.

    Attributes:
        grids: dense products by their grid.
        bytes: what nodes of these names must read.
    """

    grids: dict[int, str]
    bytes: dict[str, float]


NOTHING = Extra({}, {})


def label(kernel: Kernel, previous: str, config: ModelConfig, extra: Extra = NOTHING) -> str:
    """Node name; a product is told apart by its grid and, among equal grids, by what feeds it."""
    name, feeder = function_name(kernel.name), function_name(previous)
    if name == "gated_kernel" or (name in PRODUCTS and feeder == "gated_rms_kernel"):
        return "kda.o_proj"
    if name == "norm_product_kernel":
        return "router"
    if name not in PRODUCTS:
        return name
    if name in ("whole_kernel", "stream_kernel"):
        return "eh_proj" if "embed" in feeder else "lm_head"
    if "swiglu" in feeder:
        return "ffn.down"
    grids = {-(-outputs // 16): product for product, outputs, _ in products(config)[:4]} | extra.grids
    if kernel.grid[0] in grids:
        return grids[kernel.grid[0]]
    return "eh_proj" if "embed" in feeder or "Cat" in feeder else "mla.dense"


def products(config: ModelConfig) -> list[tuple[str, int, int]]:
    """(name, output rows, input columns) of the dense products."""
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    mla = heads * config.qk_nope_head_dim + (heads + 1) * rope + config.kv_lora_rank + heads
    return [
        ("mla.in_proj", mla, hidden),
        ("ffn.up", 2 * config.intermediate_size, hidden),
        ("kda.in_proj", 5 * width + heads, hidden),
        ("router", config.num_experts, hidden),
        ("eh_proj", hidden, 2 * hidden),
        ("lm_head", config.vocab_size, hidden),
        ("kda.o_proj", hidden, width),
        ("mla.dense", hidden, heads * config.v_head_dim),
        ("ffn.down", hidden, config.intermediate_size),
    ]


def node_bytes(name: str, config: ModelConfig, rows: int, context: int, distinct: float) -> float:
    """Weights, states and cache rows a node must read; activations are left out."""
    for product, outputs, inputs in products(config):
        if name == product:
            return outputs * inputs * BF16
    hidden, heads = config.hidden_size, config.num_attention_heads
    if name.startswith("up_"):
        shared = 2 * config.moe_shared_expert_intermediate_size
        return (distinct * 2 * config.moe_intermediate_size + shared) * hidden * BF16
    if name.startswith("down_"):
        return (distinct * config.moe_intermediate_size + config.moe_shared_expert_intermediate_size) * hidden * BF16
    if name == "chain_kernel":
        return heads * config.head_dim**2 * FP32
    if name in ("commit_kernel", "fold_kernel"):
        return 2 * len(config.kda_layer_ids) * heads * config.head_dim**2 * FP32
    if name == "split_kernel":
        return context * config.kv_row_dim * BF16
    if name == "per_head_kernel":
        return heads * config.qk_nope_head_dim * config.kv_lora_rank * BF16
    if name == "block_best_kernel":
        return rows * config.vocab_size * FP32
    return 0.0


def predicted_us(name: str, size: float, rows: int, machine: Machine) -> float:
    """Cost model: facts of the H200 (dense 2.0 us + B / 4.25 TB/s, grouped pair 3.0 us + B / 4.1, others a node)."""
    if name.startswith(("up_", "down_")):
        return 1.5 + size / 4.1e6
    if "." in name or name in ("router", "lm_head", "eh_proj"):
        base, rate = (1.7, 4.4e6) if rows == 1 else (2.0, 4.25e6) if rows <= 9 else (3.4, 4.25e6)
        return base + size / rate
    if name == "chain_kernel":
        return min(0.9 + 0.6 * rows, 2.7 + 0.21 * (rows - 1))
    return machine.node_us + size / (machine.copy_gbps * 1e3)


def node_rows(
    graphs: list[list[Kernel]],
    config: ModelConfig,
    shape: tuple[int, int, float],
    machine: Machine,
    extra: Extra = NOTHING,
) -> list[dict]:
    """Nodes of one graph, averaged over its profiled launches; shape = (rows, context, distinct experts)."""
    rows, context, distinct = shape
    sums: dict[str, list[float]] = {}
    functions: dict[str, str] = {}
    for kernels in graphs:
        previous = ""
        for kernel in kernels:
            name = label(kernel, previous, config, extra)
            sums.setdefault(name, []).append(kernel.us)
            functions[name] = kernel.name
            previous = kernel.name
    table = []
    for name, times in sums.items():
        count = len(times) / len(graphs)
        size = extra.bytes.get(name, node_bytes(name, config, rows, context, distinct))
        predicted, measured = predicted_us(name, size, rows, machine), sum(times) / len(times)
        form, function = form_of(functions[name]), function_name(functions[name])
        entry = {"name": name, "form": form, "file": kernel_files().get((form, function), ""), "count": count}
        entry |= {"bytes": size, "predicted_us": predicted, "measured_us": measured}
        table.append(entry | {"total_us": measured * count, "gap_us": (measured - predicted) * count})
    return sorted(table, key=lambda entry: -entry["total_us"])


KERNEL = {  # what the first line of a kernel looks like
    "CUDA": r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(",
    "Triton": r"\ndef _(\w+_kernel)\(",
}


@cache
def kernel_files() -> dict[tuple[str, str], str]:
    """(form, kernel function) -> file, of every CUDA and Triton kernel of the package."""
    found: dict[tuple[str, str], str] = {}
    for form, pattern in KERNEL.items():
        for path in sorted(PACKAGE.rglob("*.cu*" if form == "CUDA" else "*kernel.py")):
            for name in re.findall(pattern, path.read_text(encoding="utf-8")):
                found.setdefault((form, name), str(path.relative_to(PACKAGE)))
    return found


def form_of(kernel: str) -> str:
    """Triton, CUDA, or library; a trace shows Triton functions by their Python name."""
    if kernel.startswith("_"):
        return "Triton"
    return "CUDA" if ("CUDA", function_name(kernel)) in kernel_files() else "library"


def markdown(entries: list[dict]) -> Iterator[str]:
    """Lines of a table with one row per node name, the most expensive first; the last row sums up."""
    yield "| node | form | file | count | MB | predicted µs | measured µs | total µs |"
    yield "|---|---|---|---|---|---|---|---|"
    for entry in entries:
        yield (
            f"| {entry['name']} | {entry['form']} | {entry['file']} | {entry['count']:g} | {entry['bytes'] / 1e6:.2f} "
            f"| {entry['predicted_us']:.1f} | {entry['measured_us']:.1f} | {entry['total_us']:.0f} |"
        )
    count = sum(entry["count"] for entry in entries)
    predicted = sum(entry["predicted_us"] * entry["count"] for entry in entries)
    total = sum(entry["total_us"] for entry in entries)
    yield f"| all | | | {count:g} | | {predicted:.0f} in total | | {total:.0f} |"


def main() -> None:
    """Print the node tables of a result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--width", type=int, help="only rows of this verify width (1 = plain decode)")
    options = parser.parse_args()
    for row in json.loads(options.result.read_text(encoding="utf-8"))["rows"]:
        if options.width in (None, row["width"]):
            for graph, entries in row.get("nodes", {}).items():
                print(f"\n{row['algorithm']} width {row['width']}, {graph}\n")
                print("\n".join(markdown(entries)))


if __name__ == "__main__":
    main()
