"""The ``sgling`` command: dispatches to its subcommands, which are imported only when called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from sgling import __version__

USAGE = """usage: sgling COMMAND ...

commands:
  serve [MODEL] [flags]     start an OpenAI-compatible server (default model: ling3-pico, embedded)
  generate "prompt" [flags] answer one prompt without a server, accepted runs visible
  bench serving [flags]     load a running server and report latency, throughput and accept length

sgling COMMAND --help lists a command's flags; sgling --version prints the version."""


def _serve(argv: Sequence[str]) -> int:
    from sgling.launch_server import main

    return main(argv, "sgling serve", "model_path")


def _generate(argv: Sequence[str]) -> int:
    from sgling.generate import main

    return main(argv)


def _bench(argv: Sequence[str]) -> int:
    if not argv or argv[0] != "serving":
        return _usage_error(f"bench has no kind {argv[0]!r}" if argv else "bench needs a kind: serving")
    from sgling.bench.serving import main

    return main(argv[1:])


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"serve": _serve, "generate": _generate, "bench": _bench}


def _usage_error(message: str) -> int:
    print(f"{USAGE}\nsgling: error: {message}", file=sys.stderr)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console script; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        return _usage_error("no command")
    name, rest = argv[0], argv[1:]
    if name in ("--version", "-V"):
        print(f"sgling {__version__}")
        return 0
    if name in ("--help", "-h"):
        print(USAGE)
        return 0
    if name not in COMMANDS:
        return _usage_error(f"unknown command {name!r}")
    return COMMANDS[name](rest)


if __name__ == "__main__":
    sys.exit(main())
