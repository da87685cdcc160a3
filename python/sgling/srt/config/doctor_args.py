"""Flags of ``sgling doctor``: every flag of the server, and what to do beside looking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.flags import flag
from sgling.srt.config.server_args import ServerArgs


@dataclass(frozen=True, kw_only=True)
class DoctorArgs(ServerArgs):
    """Show what was detected and chosen, why, and what speculation is worth on this machine."""

    static: bool = flag(False, "load no weights and measure nothing")
    record_floor: bool = flag(False, "write the measured accept length into the model's acceptance.json")

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> DoctorArgs:
        """Read a command line; usage errors exit with status 2."""
        return cls.parse(argv, "sgling doctor")
