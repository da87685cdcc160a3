"""Flags of ``sgling trace``: what is run and recorded, and every flag of the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.flags import flag
from sgling.srt.config.server_args import ServerArgs


@dataclass(frozen=True, kw_only=True)
class TraceArgs(ServerArgs):
    """Record decode rounds: a Perfetto trace, and a picture of one round with its seams, nodes and idle times."""

    scenario: str = flag("scenarios", "built-in workload the prompt is taken from")
    output_len: int = flag(128, "tokens generated per run")
    repeats: int = flag(3, "runs without and with recording, in turn, for the calibration")
    torch_profiler: bool = flag(False, "record with torch's profiler too (it slows the steps down a lot)")
    predicted: str | None = flag(None, "JSON file of predicted microseconds by node name, shown beside the measured")
    seed: int = flag(0, "seed of the prompt")
    output_dir: str = flag("trace", "directory the files are written to")

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> TraceArgs:
        """Read a command line; usage errors exit with status 2."""
        args = cls.parse(argv, "sgling trace")
        if args.output_len < 8 or args.repeats < 1:
            print("sgling trace: error: --output-len must be at least 8 and --repeats at least 1", file=sys.stderr)
            raise SystemExit(2)
        return args
