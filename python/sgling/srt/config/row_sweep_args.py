"""Flags of ``sgling sweep rows``: the output file and every flag of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.flags import ServerArgsError, flag
from sgling.srt.config.server_args import ServerArgs


@dataclass(frozen=True, kw_only=True)
class RowSweepArgs(ServerArgs):
    """Measure DSPARK rounds by the rows they verify and write the table of --speculative-dspark-sps-table-path."""

    output: str = flag("sps-table.json", "JSON file to write")

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> RowSweepArgs:
        """Read a command line (usage errors exit with status 2); raises ServerArgsError for another algorithm."""
        args = cls.from_cli(argv, "sgling sweep rows")
        if args.spec.algorithm != "DSPARK":
            raise ServerArgsError("sweep rows needs --speculative-algorithm DSPARK")
        return args
