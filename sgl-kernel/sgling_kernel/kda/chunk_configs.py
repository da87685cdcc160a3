"""Fixed launch configurations of fla-core's chunk kernels, in the place of its tuning at run time.

Tuning costs 50 s before the first prompt of a process (and again for further prompt lengths), and its choice decides
how sums are split: two processes could differ in a prompt's last bits. Values: fastest on one H200 for head size 64, or
within 4 % of it; the same ones serve head size 128 (benchmark/tune_prefill.py measures all of them).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import NamedTuple

import triton

from sgling_kernel.dispatch import usable


class ChunkConfig(NamedTuple):
    """One kernel: the module it lives in, its block sizes, warps and stages."""

    module: str
    blocks: dict[str, int]
    num_warps: int
    num_stages: int = 3


CONFIGS = {
    "chunk_local_cumsum_vector_kernel": ChunkConfig("fla.ops.utils.cumsum", {"BS": 32}, 2),
    "chunk_kda_fwd_kernel_intra_sub_chunk": ChunkConfig("fla.ops.kda.chunk_intra", {}, 4, 2),
    "chunk_kda_fwd_kernel_inter_solve_fused": ChunkConfig("fla.ops.kda.chunk_intra", {"BK": 64}, 4),
    "recompute_w_u_fwd_kda_kernel": ChunkConfig("fla.ops.kda.wy_fast", {}, 4, 2),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ChunkConfig("fla.ops.common.chunk_delta_h", {"BV": 32}, 4, 2),
    "chunk_gla_fwd_kernel_o": ChunkConfig("fla.ops.gla.chunk", {"BK": 64, "BV": 64}, 4, 4),
}


def autotuner(name: str):
    """fla-core's tuner of a kernel of ``CONFIGS``; raises AttributeError or ImportError where this version has none."""
    found = getattr(importlib.import_module(CONFIGS[name].module), name)
    while not hasattr(found, "configs"):
        found = found.fn  # heuristics around the tuner
    return found


@cache
def fix_configs() -> bool:
    """Leave every kernel its one configuration; once per process. False: it tunes itself, and the log says why."""
    try:
        tuners = {name: autotuner(name) for name in CONFIGS}
    except (AttributeError, ImportError) as error:
        return usable(
            "kda.chunk with fixed configurations", f"this fla-core has other kernels ({error}): it tunes them"
        )
    for name, tuner in tuners.items():
        fixed = CONFIGS[name]
        tuner.configs = [triton.Config(dict(fixed.blocks), num_warps=fixed.num_warps, num_stages=fixed.num_stages)]
    return True
