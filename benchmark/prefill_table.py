"""Whole prompts on one GPU: seconds, and where they go by kernel family, against arithmetic and bandwidth."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import torch
from node_table import BF16, FP32, Kernel, Machine, products, profile_graphs

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.core.step import PrefillInput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.model_executor.prefill_warm_up import warm_up_prefill
from sgling.srt.speculative.nextn_worker import NextnWorker
from sgling_kernel.sampling import SamplingFlags

ROW, SLOT, REPEATS = 1, 1, 3
PEAK_TFLOPS = 790.0  # dense bf16 products on an H200, measured
CHUNK = 64  # tokens per chunk of the KDA chunk form
FAMILIES = (  # first match names the family
    ("KDA chunk form", r"l2norm|chunk_|recompute_w_u|cumsum"),
    ("KDA inputs, hand-over", r"^_conv_kernel|^_gates_kernel|^_hand_over_kernel"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("router top-k", r"topk"),
    ("grouped experts", r"[Gg]roup(ed|Problem)|grouped_mm"),
    ("dense products", r"gemm|nvjet|cutlass|xmma|_kernel_splitK|splitKreduce|whole_kernel|sliced_kernel|small_m"),
    ("norms, gates", r"rms|head_gate|gated"),
    ("combine, SwiGLU", r"combine|swiglu"),
    ("sort by expert", r"^_count_pairs|^_place_pairs|^_spread_rows"),
    ("copies", r"[Mm]emcpy|[Mm]emset|copy|Cat|index_select|gather"),
    ("elementwise", r"at::native|elementwise"),
)


class Work(NamedTuple):
    """What a family must do for one prompt: floating-point operations and bytes read and written."""

    flops: float
    bytes: float


def work(config: ModelConfig, tokens: int, layers: int) -> dict[str, Work]:
    """Work of a prompt from position 0, NEXTN layer included (``layers`` = 1, else 0); activations count once."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    kda = len(config.kda_layer_ids)
    mla = len(config.mla_layer_ids) + layers
    moe = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers)) + layers
    counts = {"mla.in_proj": mla, "mla.dense": mla, "kda.in_proj": kda, "kda.o_proj": kda, "router": moe}
    counts |= {"ffn.up": config.num_hidden_layers + layers - moe, "eh_proj": layers}
    counts["ffn.down"] = counts["ffn.up"]
    shared = config.moe_shared_expert_intermediate_size
    shapes = [(counts[name], outputs, inputs) for name, outputs, inputs in products(config) if name in counts]
    shapes += [(moe, 2 * shared, hidden), (moe, hidden, shared)]
    shapes += [(mla, heads * (config.qk_nope_head_dim + config.v_head_dim), latent)]
    dense = Work(
        2.0 * tokens * sum(n * o * i for n, o, i in shapes),
        BF16 * sum(n * (o * i + tokens * (o + i)) for n, o, i in shapes),
    )
    width, experts, k = config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok
    grouped = Work(
        2.0 * tokens * k * 3 * hidden * width * moe,
        BF16 * moe * (experts * 3 * hidden * width + tokens * k * (2 * hidden + 3 * width)),
    )
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    attention = Work(2.0 * tokens**2 * heads * key * mla, BF16 * mla * tokens * heads * 4 * key)
    dim = config.head_dim
    per_head = 2.0 * (4 * CHUNK * dim + 3 * dim * dim + CHUNK * dim)
    chunk = Work(per_head * tokens * heads * kda, kda * tokens * heads * (4 * dim * BF16 + dim * FP32))
    return {"dense products": dense, "grouped experts": grouped, "attention": attention, "KDA chunk form": chunk}


def family_of(kernel: Kernel) -> str:
    """Family name, or the start of the kernel's own name."""
    return next((name for name, pattern in FAMILIES if re.search(pattern, kernel.name)), kernel.name[:50])


def family_rows(kernels: list[Kernel], todo: dict[str, Work], machine: Machine) -> list[dict]:
    """One row per family, longest first: nodes, microseconds, what must be done, and the time that alone would take."""
    families: dict[str, list[float]] = {}
    for kernel in kernels:
        families.setdefault(family_of(kernel), []).append(kernel.us)
    rows = []
    for name, times in families.items():
        row: dict = {"family": name, "count": len(times), "us": sum(times)}
        if name in todo:
            flops, size = todo[name]
            floor = max(flops / PEAK_TFLOPS / 1e6, size / machine.copy_gbps / 1e3)
            row |= {"gflop": flops / 1e9, "bytes": size, "floor_us": floor, "tflops": flops / row["us"] / 1e6}
        rows.append(row)
    return sorted(rows, key=lambda row: -row["us"])


def measure_prefill(runner: ModelRunner, tokens: int, machine: Machine) -> dict:
    """Seconds of the warm-up and of whole prompts of ``tokens`` (NEXTN layer included), and the family table of one."""
    worker = NextnWorker(runner)
    warm_up_s = warm_up_prefill(runner, worker, tokens)
    ids = torch.randint(0, runner.model_config.vocab_size, (tokens,)).tolist()

    def prompt() -> None:
        runner.pools.state.clear(SLOT)
        worker.prefill(PrefillInput(ROW, SLOT, ids, 0, None, SamplingFlags(), None, None))

    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        prompt()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    rows = family_rows(profile_kernels(prompt), work(runner.model_config, tokens, 1), machine)
    show(tokens, warm_up_s, seconds, rows)
    return {"tokens": tokens, "warm_up_s": warm_up_s, "seconds": seconds, "families": rows}


def profile_kernels(run) -> list[Kernel]:
    """Every kernel, copy and fill of one call, in order."""
    return [kernel for launch in profile_graphs(run, 1, smallest=1) for kernel in launch]


def show(tokens: int, warm_up_s: float, seconds: list[float], rows: list[dict]) -> None:
    """The table."""
    shown = ", ".join(f"{value:.4f}" for value in seconds)
    print(f"prefill {tokens}: warm-up {warm_up_s:.1f} s, then {shown} s", flush=True)
    for row in rows:
        extra = ""
        if "gflop" in row:
            extra = f"{row['gflop']:9.0f} GFLOP {row['bytes'] / 1e9:7.2f} GB, floor {row['floor_us']:7.0f} us"
            extra += f", {row['tflops']:5.0f} TFLOP/s"
        print(f"  {row['family']:50s} {row['count']:5d} x, {row['us']:9.0f} us {extra}", flush=True)
