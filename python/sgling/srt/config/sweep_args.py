"""Flags of ``sgling sweep depth``: the workload, the grid, and every flag of the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.flags import flag
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.config.spec_config import MAX_WIDTH

_CHOOSING = ("speculative_depth", "speculative_depth_table", "speculative_adaptive")


@dataclass(frozen=True, kw_only=True)
class SweepArgs(ServerArgs):
    """Measure every draft depth on a workload and write the table that --speculative-depth auto reads."""

    base_url: str | None = flag(None, "sweep a running server instead of an engine of its own")
    max_steps: int = flag(MAX_WIDTH - 1, "deepest draft; a running server's own depth bounds it")
    concurrency: list[int] | None = flag(None, "batch sizes to measure; default: 1")
    scenario: str = flag("scenarios", "built-in workload: one scenario, or scenarios = all of them in turn")
    prompts: int = flag(8, "prompts per point")
    output_len: int = flag(64, "tokens per answer, at most")
    repeats: int = flag(2, "times the whole grid is measured")
    seed: int = flag(0, "seed of the prompts")
    output: str = flag("depth-table.json", "file the table is written to")

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> SweepArgs:
        """Read a command line; usage errors exit with status 2."""
        args = cls.parse(argv, "sgling sweep depth")
        bad = [name for name in ("prompts", "output_len", "repeats", "max_steps") if getattr(args, name) < 1]
        bad += ["concurrency"] if any(size < 1 for size in args.batch_sizes) else []
        if bad:
            print(f"sgling sweep depth: error: --{bad[0].replace('_', '-')} must be at least 1", file=sys.stderr)
            raise SystemExit(2)
        return args

    @property
    def batch_sizes(self) -> list[int]:
        """Concurrencies of the grid."""
        return self.concurrency or [1]

    def engine_flags(self) -> dict:
        """Keyword arguments of the engine that is swept: drafts as deep as the grid goes."""
        batches = {"cuda_graph_max_bs_decode": max(self.batch_sizes)} if has_graphs(self.device) else {}
        flags = {**batches, **at_fixed_depth(self)}
        return {**flags, "speculative_algorithm": "NEXTN", "speculative_num_steps": self.max_steps}


def has_graphs(device: str) -> bool:
    """Whether an engine with this ``--device`` runs on a GPU: a CPU is not asked for graphs, and so refuses none."""
    import torch  # here, so that --help and usage errors do not wait for it

    return device != "cpu" and torch.cuda.is_available()


def every_width(device: str) -> dict:
    """Engine keyword arguments that capture every width where there are graphs.

    Narrow steps are then not slower for another reason than their width.
    """
    return {"cuda_graph_all_widths": True} if has_graphs(device) else {}


def at_fixed_depth(args: ServerArgs) -> dict:
    """Engine keyword arguments of ``args`` with every step as wide as its request allows: what a measurement needs."""
    given = {**every_width(args.device), **args.given()}
    return {name: value for name, value in given.items() if name not in _CHOOSING}
