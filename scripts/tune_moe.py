"""Measure the nodes of an MoE layer at one rank's shape, and how the kernels' free constants change them.

    python scripts/tune_moe.py                          # every node and the whole chain, rows 1 to 17
    python scripts/tune_moe.py --rows 6 17 --variants   # and the products with other constants
    python scripts/tune_moe.py --variants "down walk"   # ... with those of the variants whose names begin so

Captured graphs of a chain of equal nodes with programmatic dependent launch; every node takes another routing draw and
another of two layers' weights, so nothing stays in the L2 cache. Bytes are those of the distinct experts touched. The
constants a variant changes (warps and tiles per CTA, CTAs per multiprocessor, shared memory) change no bit.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from sgling_kernel import cuda as runtime
from sgling_kernel import dispatch
from sgling_kernel.cuda.build import INCLUDE, PACKAGE, Target, build
from sgling_kernel.moe import ExpertOutputs, ExpertWeights, cuda
from sgling_kernel.moe import kernel as triton_experts
from sgling_kernel.norm import cuda as norm
from sgling_kernel.router import RouterConfig
from sgling_kernel.router import cuda as router
from sgling_kernel.timing import graph_us

HIDDEN, WIDTH, EXPERTS, TOP = 2560, 192, 512, 8
LAYERS, NODES = 2, 48
REPLAYS, GROUPS = 10, 7
ROUTER = RouterConfig(8, 4, TOP, True, 2.5)

LARGEST_SHARED = (
    "    cudaLaunchAttribute attribute{};",
    "    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);\n"
    "    cudaLaunchAttribute attribute{};",
)
TWO_TILES = ("WARP_TILES = 1", "WARP_TILES = 2")
VARIANTS = {  # "product form: what" or "all: what" -> what it replaces in the sources of moe/, norm/, router/, headers
    "down each: two warps": [("int WARPS = 4", "int WARPS = 2"), ("WARPS* WARP, 5", "WARPS* WARP, 10")],
    "down each: two warps of two tiles": [
        TWO_TILES,
        ("int WARPS = 4", "int WARPS = 2"),
        ("WARPS* WARP, 5", "WARPS* WARP, 6"),
    ],
    "down each: four warps of two tiles": [TWO_TILES, ("WARPS* WARP, 5", "WARPS* WARP, 3")],
    "down each: four CTAs": [("WARPS* WARP, 5", "WARPS* WARP, 4")],
    "all: largest shared memory": [LARGEST_SHARED],
}
FORMS = ("each", "walk")  # a CTA per pair, or one per multiprocessor that walks over the distinct experts
SOURCES = ("moe/up.cu", "moe/down.cu", "moe/finish.cu", "router/topk.cu")


class Bench(NamedTuple):
    """Operands: experts and shared expert by layer, activations, routing draws, and what a node needs besides."""

    experts: list[tuple[ExpertWeights, ExpertWeights]]
    x: torch.Tensor
    ids: list[torch.Tensor]
    weights: torch.Tensor
    hidden: torch.Tensor
    values: torch.Tensor
    logits: torch.Tensor

    @property
    def distinct(self) -> float:
        """Distinct routed experts of a draw, mean."""
        return statistics.mean(len(ids.unique()) for ids in self.ids)


def make_layers() -> list[tuple[ExpertWeights, ExpertWeights]]:
    """Random weights of two layers, the last ones' clamps."""

    def weights(lead: tuple[int, ...], limit: float) -> ExpertWeights:
        w13 = torch.randn(*lead, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16) / HIDDEN**0.5
        return ExpertWeights(w13, torch.randn(*lead, HIDDEN, WIDTH, dtype=torch.bfloat16) / WIDTH**0.5, limit)

    return [(weights((EXPERTS,), 4.0), weights((), 5.0)) for _ in range(LAYERS)]


def make_bench(layers: list[tuple[ExpertWeights, ExpertWeights]], rows: int) -> Bench:
    """Uniform routing."""
    ids = [torch.rand(rows, EXPERTS).topk(TOP).indices for _ in range(NODES)]
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
    hidden = torch.randn(rows, TOP + 1, WIDTH, dtype=torch.bfloat16)
    values, logits = torch.randn(rows, TOP + 1, HIDDEN), torch.randn(NODES, rows, EXPERTS)
    return Bench(layers, x, ids, torch.rand(rows, TOP), hidden, values, logits)


def node_us(node: Callable[[int], object]) -> float:
    """Microseconds per node of a captured chain."""

    def run() -> None:
        for index in range(NODES):
            node(index)

    return graph_us(run, REPLAYS, GROUPS) / NODES


def report(name: str, us: float, megabytes: float = 0.0) -> None:
    """One line of the table."""
    print(f"  {name:40} {us:7.2f} us" + (f"  {megabytes / us:5.2f} TB/s" if megabytes else ""), flush=True)


def measure_small(bench: Bench) -> None:
    """Top-k, norm and finish."""
    bias, weight = torch.randn(EXPERTS), torch.ones(HIDDEN, dtype=torch.bfloat16)
    outputs = ExpertOutputs(bench.values, bench.weights, torch.bfloat16)
    report("top-k", node_us(lambda i: router.grouped_topk(bench.logits[i], bias, ROUTER)))
    report("norm", node_us(lambda _: norm.rms_norm(bench.x, weight, 1e-6)))
    report("add + norm", node_us(lambda _: norm.fused_add_rms_norm(bench.x, bench.x, weight, 1e-6)))
    for ctas in (1, 2, 4):
        us = node_us(lambda _, ctas=ctas: cuda.combine(outputs, ctas))
        report(f"combine, {ctas} CTAs a row", us)
        us = node_us(lambda _, ctas=ctas: cuda.combine_add_rms_norm(outputs, bench.x, weight, 1e-6, ctas))
        report(f"combine + add + norm, {ctas} CTAs a row", us)


def ctas_of(form: str) -> int:
    """What the bindings are told of a form."""
    return torch.cuda.get_device_properties(0).multi_processor_count if form == "walk" else 0


def up_node(bench: Bench, form: str) -> Callable[[int], object]:
    return lambda i: cuda.up(bench.x, *bench.experts[i % LAYERS], bench.ids[i], ctas_of(form))


def down_node(bench: Bench, form: str) -> Callable[[int], object]:
    return lambda i: cuda.down(bench.hidden, *bench.experts[i % LAYERS], bench.ids[i], ctas_of(form))


def pair_node(bench: Bench, up: str, down: str) -> Callable[[int], object]:
    def run(i: int) -> None:
        layer = bench.experts[i % LAYERS]
        cuda.down(cuda.up(bench.x, *layer, bench.ids[i], ctas_of(up)), *layer, bench.ids[i], ctas_of(down))

    return run


def layer_node(bench: Bench, up: str, down: str) -> Callable[[int], object]:
    """Top-k, up, down, finish: the nodes as they follow one another in a model, without the router."""
    bias, weight = torch.zeros(EXPERTS), torch.ones(HIDDEN, dtype=torch.bfloat16)  # uniform routing

    def run(i: int) -> None:
        layer = bench.experts[i % LAYERS]
        weights, ids = router.grouped_topk(bench.logits[i], bias, ROUTER)
        values = cuda.down(cuda.up(bench.x, *layer, ids, ctas_of(up)), *layer, ids, ctas_of(down))
        cuda.combine_add_rms_norm(ExpertOutputs(values, weights, torch.bfloat16), bench.x, weight, 1e-6)

    return run


def measure_products(
    bench: Bench, ups: tuple[str, ...] = FORMS, downs: tuple[str, ...] = FORMS, alone: tuple[str, ...] = ("up", "down")
) -> None:
    """Products alone and together in the named forms."""
    up_mb = (bench.distinct + 1) * 2 * HIDDEN * WIDTH * 2 / 1e6
    for up in ups if "up" in alone else ():
        report(f"up {up}", node_us(up_node(bench, up)), up_mb)
    for down in downs if "down" in alone else ():
        report(f"down {down}", node_us(down_node(bench, down)), up_mb / 2)
    for up, down in itertools.product(ups, downs):
        report(f"up {up}, down {down}", node_us(pair_node(bench, up, down)), 1.5 * up_mb)
        report(f"top-k to finish, up {up}, down {down}", node_us(layer_node(bench, up, down)), 1.5 * up_mb)


def measure_triton(bench: Bench) -> None:
    """The Triton twin of both products."""
    args = (bench.x, *bench.experts[0], bench.weights)
    us = node_us(lambda i: triton_experts.experts_by_pair(*args, bench.ids[i]))
    report("up and down, Triton", us, 1.5 * (bench.distinct + 1) * 2 * HIDDEN * WIDTH * 2 / 1e6)


def prepare_variants(root: Path, names: list[str]) -> None:
    """Edited copies of the sources, one folder per variant, compiled at once; ValueError for an edit without effect."""
    target, jobs = Target(torch.cuda.get_device_capability()), []
    for name in names:
        for folder in ("moe", "norm", "router"):
            shutil.copytree(PACKAGE / folder, root / name / folder)
            for header in INCLUDE.iterdir():
                shutil.copy(header, root / name / folder)
        for old, new in VARIANTS[name]:
            holders = [path for path in (root / name).rglob("*.cu*") if old in path.read_text(encoding="utf-8")]
            if not holders:
                raise ValueError(f"nothing to replace for {old!r}")
            for path in holders:
                path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
        jobs += [(root / name / source, target) for source in SOURCES]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: build(*job), jobs))


@contextmanager
def variant(root: Path) -> Iterator[None]:
    """The bindings call the copies below ``root``."""
    original = runtime.function
    runtime.function = lambda path, name: original(root / path if path in SOURCES else path, name)
    try:
        yield
    finally:
        runtime.function = original


def measure_variants(bench: Bench, root: Path, names: list[str]) -> None:
    """Products with other constants: the product and form that a variant changes, beside every form of the other."""
    for name in names:
        print(f"  {name}:", flush=True)
        product, *form = name.split(":")[0].split()
        with variant(root / name):
            measure_products(bench, **({f"{product}s": tuple(form), "alone": (product,)} if form else {}))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 9, 17])
    parser.add_argument(
        "--variants", nargs="?", const="", metavar="PREFIX", help="also other constants of the products, by name"
    )
    parser.add_argument("--no-pdl", action="store_true", help="launch nodes strictly one after another")
    options = parser.parse_args()
    dispatch.set_kernel_switches(pdl=not options.no_pdl)
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    layers = make_layers()
    names = [] if options.variants is None else [name for name in VARIANTS if name.startswith(options.variants)]
    with tempfile.TemporaryDirectory() as root:
        prepare_variants(Path(root), names)
        for rows in options.rows:
            bench = make_bench(layers, rows)
            print(f"{rows} rows, {bench.distinct:.1f} distinct experts", flush=True)
            measure_small(bench)
            measure_products(bench)
            measure_triton(bench)
            measure_variants(bench, Path(root), names)


if __name__ == "__main__":
    main()
