"""How many torch threads a step may use on a CPU: one to decode, all cores for a long prefill chunk."""

from __future__ import annotations

import os

import torch

from sgling.srt.config.environ import openmp_threads
from sgling.srt.config.server_args import ServerArgs

LONG_CHUNK = 256  # rows from which a chunk's products are worth waking other threads


class CpuThreads:
    """The rule of docs/decisions/0005-cpu-threads.md; does nothing on a GPU or where ``OMP_NUM_THREADS`` decides.

    The setting belongs to the calling thread, so the scheduler asks at every step, from the thread that launches.
    """

    def __init__(self, args: ServerArgs):
        self._enabled = args.device == "cpu" and openmp_threads() is None
        self._long = 1 if args.enable_deterministic_inference else max(1, _usable_cores() // args.tp_size)

    def for_rows(self, rows: int) -> None:
        """Prepare a step of ``rows`` rows. A call that changes nothing costs well under a microsecond."""
        if self._enabled:
            torch.set_num_threads(self._long if rows >= LONG_CHUNK else 1)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
