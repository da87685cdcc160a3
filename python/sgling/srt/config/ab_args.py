"""Flags of ``sgling ab``: two recorded runs, or two servers that are measured in turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.bench_args import BenchServingArgs
from sgling.srt.config.flags import build_parser, flag, parse_flags

USAGE = "usage: sgling ab A B [--flag VALUE ...]   (A and B: record files of bench serving, or server URLs)"


def is_url(side: str) -> bool:
    """Whether a side names a server."""
    return side.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class AbArgs(BenchServingArgs):
    """Compare two builds on mean TPOT x mean accept length."""

    a: str = ""
    b: str = ""
    min_effect: float = flag(0.01, "differences below this share count as none")
    resamples: int = flag(2000, "bootstrap resamples behind the intervals")
    different_workloads: bool = flag(False, "compare records of different workloads all the same")
    fail_if_slower: bool = flag(False, "exit status 1 when B is slower")
    json: str | None = flag(None, "file for the machine-readable result")

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> AbArgs:
        """Read a command line; usage errors exit with status 2."""
        parser = build_parser(cls, "sgling ab A B", cls.__doc__.splitlines()[0])
        sides = [] if any(name in ("-h", "--help") for name in argv) else list(argv[:2])
        if sides and (len(sides) < 2 or any(side.startswith("-") for side in sides)):
            print(f"{USAGE}\nsgling ab: error: two sides are needed", file=sys.stderr)
            raise SystemExit(2)
        given = parse_flags(parser, argv[len(sides) :])
        if not sides:
            parser.error(USAGE)
        args = cls(a=sides[0], b=sides[1], **given)
        if is_url(args.a) != is_url(args.b):
            parser.error("A and B must both be record files or both be server URLs")
        if error := args.error():
            parser.error(error)
        return args
