"""Names the nodes of a profiled step and sets measured time beside bytes and the cost model.

Nodes run one after another (no overlap), so a node's time is the advance of the latest end: launch gap included.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from sgling.srt.config.model_config import ModelConfig

BF16, FP32 = 2, 4


class Kernel(NamedTuple):
    """One kernel of a trace: function name, grid, microseconds since the previous kernel's end."""

    name: str
    grid: tuple[int, ...]
    us: float


class Machine(NamedTuple):
    """Constants calibrated on the machine: microseconds of an empty node, GB/s of a copy (read + written)."""

    node_us: float
    copy_gbps: float


def profile_graphs(run: Callable[[], None], rounds: int) -> list[list[Kernel]]:
    """Kernels of each graph launch of ``rounds`` calls of ``run``, in launch order."""
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
        own.append(Kernel(event["name"], tuple(event["args"].get("grid", ())), finished - max(end, event["ts"] - 20)))
        end = max(end, finished)
    return [kernels for kernels in graphs.values() if len(kernels) > 8]


def label(kernel: Kernel, previous: str, config: ModelConfig) -> str:
    """Node name; a product is told apart by its grid and by what feeds it."""
    if "_whole_kernel" not in kernel.name and "_sliced_kernel" not in kernel.name:
        return kernel.name.split("(")[0].removeprefix("void ")[:60].strip("_")
    if "_gated_rms_kernel" in previous:
        return "kda.o_proj"
    if "_head_gate_kernel" in previous:
        return "mla.dense"
    if "_swiglu_kernel" in previous:
        return "ffn.down"
    if "_sliced_kernel" not in kernel.name:
        return "lm_head"
    grids = {-(-outputs // 16): name for name, outputs, _ in products(config)[:5]}
    return grids.get(kernel.grid[0], f"product {kernel.grid[0]}")


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
    if name == "up_kernel":
        shared = 2 * config.moe_shared_expert_intermediate_size
        return (distinct * 2 * config.moe_intermediate_size + shared) * hidden * BF16
    if name == "down_kernel":
        return (distinct * config.moe_intermediate_size + config.moe_shared_expert_intermediate_size) * hidden * BF16
    if name == "chain_kernel":
        return heads * config.head_dim**2 * FP32
    if name == "commit_kernel":
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
    if name in ("up_kernel", "down_kernel"):
        return 1.5 + size / 4.1e6
    if "." in name or name in ("router", "lm_head", "eh_proj"):
        base, rate = (1.7, 4.4e6) if rows == 1 else (2.0, 4.25e6) if rows <= 9 else (3.4, 4.25e6)
        return base + size / rate
    if name == "chain_kernel":
        return 0.9 + 0.6 * rows
    return machine.node_us + size / (machine.copy_gbps * 1e3)


def node_rows(
    graphs: list[list[Kernel]], config: ModelConfig, shape: tuple[int, int, float], machine: Machine
) -> list[dict]:
    """Nodes of one graph, averaged over its profiled launches; shape = (rows, context, distinct experts)."""
    rows, context, distinct = shape
    sums: dict[str, list[float]] = {}
    for kernels in graphs:
        previous = ""
        for kernel in kernels:
            sums.setdefault(label(kernel, previous, config), []).append(kernel.us)
            previous = kernel.name
    table = []
    for name, times in sums.items():
        count = len(times) / len(graphs)
        size = node_bytes(name, config, rows, context, distinct)
        predicted, measured = predicted_us(name, size, rows, machine), sum(times) / len(times)
        entry = {"name": name, "count": count, "bytes": size, "predicted_us": predicted, "measured_us": measured}
        table.append(entry | {"total_us": measured * count, "gap_us": (measured - predicted) * count})
    return sorted(table, key=lambda entry: -entry["total_us"])
