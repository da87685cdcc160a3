"""Every configuration that fla-core offers for its chunk kernels, at one rank's shape, beside the fixed one of each.

    python benchmark/tune_prefill.py --output benchmark/results/h200/prefill_configs.json      # more than a minute

The fixed ones are ``sgling_kernel/kda/chunk_configs.py``; this run says what they cost against the best.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from sgling_kernel.kda import KDAParams, chunk, chunk_configs, gpu


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


def prefill_layer(tokens: int, heads: int, dim: int) -> None:
    """One KDA layer over random rows; the library tunes each kernel it has not met."""
    width = heads * dim
    device = torch.device("cuda")
    bf16 = {"dtype": torch.bfloat16, "device": device}
    params = KDAParams(
        conv_weight=torch.randn(3 * width, 4, device=device) / 2,
        a_log=torch.rand(heads, device=device),
        dt_bias=torch.randn(heads, dim, device=device),
        lower_bound=-5.0,
    )
    rows = (
        torch.randn(tokens, 3 * width, **bf16),
        torch.randn(tokens, width, **bf16),
        torch.randn(tokens, heads, **bf16),
    )
    pools = torch.zeros(1, 3, 3 * width, **bf16), torch.zeros(1, heads, dim, dim, device=device)
    gpu.kda_extend(*rows, params, *pools, torch.zeros(1, dtype=torch.int64, device=device))
    torch.cuda.synchronize()


def milliseconds(timing: float | list[float]) -> float:
    """Median of a tuner's measurement (a number, or quantiles with the median first)."""
    return float(timing[0] if isinstance(timing, (list, tuple)) else timing)


def measured(name: str) -> dict:
    """Best and fixed configuration of a kernel in microseconds; the fixed one is None where the library left it out."""
    fixed = chunk_configs.CONFIGS[name]
    wanted = {**fixed.blocks, "num_warps": fixed.num_warps, "num_stages": fixed.num_stages}
    timings = {config: milliseconds(value) for config, value in chunk_configs.autotuner(name).configs_timings.items()}
    best = min(timings, key=timings.get)
    own = [value for config, value in timings.items() if wanted.items() <= config.all_kwargs().items()]
    return {
        "kernel": name,
        "configurations": len(timings),
        "best": {key: value for key, value in best.all_kwargs().items() if value is not None},
        "best_us": 1e3 * timings[best],
        "fixed": wanted,
        "fixed_us": 1e3 * own[0] if own else None,
    }


def main() -> None:
    """Tune, print, save."""
    args = parse()
    gpu.fix_configs = lambda: True
    chunk.why_not = lambda: "the library's tuners are measured"
    prefill_layer(args.tokens, args.heads, args.head_dim)
    rows = [measured(name) for name in chunk_configs.CONFIGS]
    for row in rows:
        print(
            f"{row['kernel']:50s} best {row['best_us']:8.1f} us {row['best']}, fixed {row['fixed_us']} us", flush=True
        )
    if args.output is not None:
        report = {"gpu": torch.cuda.get_device_name(), "tokens": args.tokens, "heads": args.heads, "rows": rows}
        args.output.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
