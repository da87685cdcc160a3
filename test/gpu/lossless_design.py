"""Which combinations the lossless suite runs: a covering design (every pair of values of any two axes), or all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gpu.gpu_case import PLAIN, WIDEST, Play, Setup
from spec.invariance import pairwise

WIDTHS = (*range(1, 10), WIDEST)
AXES = {
    "algorithm": ("NEXTN", "DSPARK"),
    "width": WIDTHS,
    "rollback": ("replay", "staged"),
    "metadata": ("in_graph", "glue", "eager"),
    "relay": ("merged", "three"),
    "graphs": (True, False),
    "kernels": ("cuda", "triton"),
    "pdl": (True, False),
    "drafter": ("own", "random", "wrong", "oracle"),
    "batch": (1, 2, 4),
}
PLAIN_AXES = {
    "metadata": AXES["metadata"],
    "graphs": AXES["graphs"],
    "kernels": AXES["kernels"],
    "pdl": AXES["pdl"],
    "batch": AXES["batch"],
}

Case = tuple[Setup, Play]


def speculative(values: tuple) -> Case:
    """A case from one value of each axis. A DSPARK block has at least one draft: width 1 becomes 2."""
    algorithm, width, *rest = values
    setup, play = rest[:-2], rest[-2:]
    return Setup(algorithm, max(width, 2) if algorithm == "DSPARK" else width, *setup), Play(*play)


def plain(values: tuple) -> Case:
    """The same without speculation."""
    *setup, batch = values
    names = list(PLAIN_AXES)[:-1]
    return PLAIN._replace(**dict(zip(names, setup, strict=True))), Play(batch=batch)


def covering() -> list[Case]:
    """The small design."""
    return [*map(plain, pairwise(PLAIN_AXES)), *map(speculative, pairwise(AXES))]


def everything(algorithm: str, width: int) -> Iterator[Case]:
    """Every combination of one algorithm and width."""
    axes = {**AXES, "algorithm": (algorithm,), "width": (width,)}
    yield from map(speculative, itertools.product(*axes.values()))


def name_of(case: Case) -> str:
    """Test id."""
    return "-".join(str(value) for part in case for value in part)
