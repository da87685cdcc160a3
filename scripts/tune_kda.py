"""Measure both GPU forms of the KDA chain and the cuts of the CUDA form, for every window width.

    python scripts/tune_kda.py                  # the cut that the CUDA form uses by itself
    python scripts/tune_kda.py --sweep          # and every other; no bit depends on the cut

Two times per form, both in captured graphs with states and weights too many for the L2 cache: ``alone``, a chain of KDA
nodes; and ``behind``, the time a KDA node adds behind each of a chain of input projections, as in the model.
The cuts in use stand in sgling_kernel/kda/cuda.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from typing import NamedTuple

import torch

from sgling_kernel.kda import KDAParams, ReplayRing, cuda, kernel
from sgling_kernel.linear import linear
from sgling_kernel.timing import graph_us

HIDDEN, RING = 2560, 64
LAYERS = 35
STATES, WEIGHTS, NODES = 6 * LAYERS, 8, 64  # 110 MB of states, 210 MB of weights; nodes per graph
REPLAYS, GROUPS = 10, 7
SLOT = 1


class Bench(NamedTuple):
    """Operands of a chain of layers: weights of the input projection, constants, pools, the rings of 35 layers."""

    weights: list[torch.Tensor]
    params: KDAParams
    conv: torch.Tensor
    state: torch.Tensor
    ring: ReplayRing
    slots: torch.Tensor
    seq_lens: torch.Tensor


def make_bench(heads: int, dim: int) -> Bench:
    """Random operands; one request in slot 1."""
    width, channels = heads * dim, 3 * heads * dim
    bf16 = {"dtype": torch.bfloat16}
    lead = (LAYERS, 2, RING)
    ring = ReplayRing(
        torch.zeros(*lead, channels, **bf16), torch.zeros(*lead, heads, dim, **bf16),
        torch.zeros(*lead, heads, dim, **bf16), torch.zeros(*lead, heads, dim), torch.zeros(*lead, heads),
    )  # fmt: skip
    return Bench(
        [torch.randn(5 * width + heads, HIDDEN, **bf16) / HIDDEN**0.5 for _ in range(WEIGHTS)],
        KDAParams(torch.randn(channels, 4) * 0.5, torch.randn(heads) * 0.3, torch.randn(heads, dim), -5.0),
        torch.randn(STATES, 2, 3, channels, **bf16),
        torch.randn(STATES, 2, heads, dim, dim) * 0.05,
        ring,
        torch.tensor([SLOT]),
        torch.tensor([37]),
    )


Node = Callable[[int, torch.Tensor], None]  # layer number, projected rows [N, 5 heads dim + heads]


def kda_node(bench: Bench, width: int, form: str, grid: cuda.Grid | None) -> Node:
    """One KDA node over ``width`` rows; width 1 is a decode, which writes state and window."""
    heads, dim = bench.params.dt_bias.shape
    sizes = (3 * heads * dim, heads, heads * dim, heads * dim)
    rings = [ReplayRing(*layer) for layer in zip(*bench.ring, strict=True)]

    def run(layer: int, rows: torch.Tensor) -> None:
        qkv, b, f, _ = rows.split(sizes, -1)
        pools = (bench.conv[layer % STATES], bench.state[layer % STATES], bench.slots)
        ring = rings[layer % LAYERS]
        if form == "triton":
            if width == 1:
                kernel.kda_decode(qkv, f, b, bench.params, *pools)
            else:
                kernel.kda_verify_replay(qkv, f, b, bench.params, *pools, bench.seq_lens, width, ring)
        elif width == 1:
            store = (None,) * 5 + (cuda._arrivals(bench.conv, heads), 1)
            cuda.chain((qkv, f, b), bench.params, pools, (None, 1), cuda.DECODE, store, grid)
        else:
            store = (*ring, None, RING)
            cuda.chain((qkv, f, b), bench.params, pools, (bench.seq_lens, width), cuda.REPLAY, store, grid)

    return run


def alone_us(bench: Bench, width: int, node: Node) -> float:
    """Time per node of a chain of KDA nodes."""
    rows = torch.randn(width, bench.weights[0].shape[0], dtype=torch.bfloat16)

    def run() -> None:
        for layer in range(STATES):
            node(layer, rows)

    return graph_us(run, REPLAYS, GROUPS) / STATES


def behind_us(bench: Bench, width: int, node: Node | None) -> float:
    """Time per pair of an input projection and a KDA node; without the node when None."""
    x = torch.randn(width, HIDDEN, dtype=torch.bfloat16)

    def run() -> None:
        for layer in range(NODES):
            rows = linear(x, bench.weights[layer % WEIGHTS])
            if node is not None:
                node(layer, rows)

    return graph_us(run, REPLAYS, GROUPS) / NODES


def commit_us(bench: Bench, accept: int, form: str) -> float:
    """Time of one commit of all layers: states come from memory."""
    module = cuda if form == "cuda" else kernel
    lengths = torch.tensor([accept])

    def run() -> None:
        for first in range(0, STATES, LAYERS):
            pools = (bench.conv[first : first + LAYERS], bench.state[first : first + LAYERS])
            module.commit_replay(*pools, bench.ring, bench.slots, bench.seq_lens, lengths, 17)

    return graph_us(run, REPLAYS, GROUPS) / (STATES // LAYERS)


def grids(width: int, sweep: bool) -> list[cuda.Grid | None]:
    """Cuts of the CUDA form to try; None is the one the operator uses by itself."""
    if not sweep:
        return [None]
    warps = (2, 3, 4, 8) if width == 1 else (4, 8, 12)
    return [None, *(cuda.Grid(rows, count) for rows in (4, 8, 16, 32) for count in warps if rows <= 4 * count)]


def measure(bench: Bench, width: int, sweep: bool) -> dict:
    """One row of the table; prints every candidate."""
    heads, dim = bench.params.dt_bias.shape
    base = behind_us(bench, width, None)
    print(f"width {width}: input projection alone {base:.2f} us", flush=True)
    best: dict[str, tuple[float, cuda.Grid | None]] = {}
    for form in ("triton", "cuda"):
        for grid in grids(width, sweep) if form == "cuda" else [None]:
            node = kda_node(bench, width, form, grid)
            alone, behind = alone_us(bench, width, node), behind_us(bench, width, node) - base
            print(f"  {form:6} {str(grid or 'default'):40} alone {alone:6.2f}  behind {behind:6.2f} us", flush=True)
            if form not in best or (grid is None and form == "cuda"):
                best[form] = (behind, grid)
    times = {f"{form}_us": round(value, 3) for form, (value, _) in best.items()}
    return {"gpu": torch.cuda.get_device_name(), "heads": heads, "head_dim": dim, "width": width, **times}


def main() -> None:
    """Measure, print, and with --write keep the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 5, 6, 9, 17])
    parser.add_argument("--sweep", action="store_true", help="try every cut of the CUDA form")
    options = parser.parse_args()
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    bench = make_bench(options.heads, options.head_dim)
    rows = [measure(bench, width, options.sweep) for width in options.widths]
    for accept in (1, 4, 9):
        times = [f"{form} {commit_us(bench, accept, form):.1f} us" for form in ("triton", "cuda")]
        print(f"commit of {accept} rows, {LAYERS} layers: {', '.join(times)}", flush=True)
    table = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "rows": rows}
    print(json.dumps(table))


if __name__ == "__main__":
    main()
