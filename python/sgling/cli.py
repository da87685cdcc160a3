"""The ``sgling`` command: dispatches to its subcommands, which are imported only when called."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from sgling import __version__


class Command(NamedTuple):
    """A subcommand: its argument line, what it does, and the module whose ``main(argv)`` runs it."""

    arguments: str
    does: str
    module: str


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "[MODEL] [flags]",
        "start an OpenAI-compatible server (default model: ling3-pico, embedded)",
        "sgling.launch_server",
    ),
    "generate": Command(
        '"prompt" [flags]', "answer one prompt without a server, accepted runs visible", "sgling.generate"
    ),
    "doctor": Command(
        "[MODEL] [flags]", "what was detected, what was chosen and why, what speculation is worth", "sgling.doctor"
    ),
    "bench serving": Command(
        "[flags]", "load a running server and report latency, throughput and accept length", "sgling.bench.serving"
    ),
    "bench round": Command("[flags]", "time the decode round of a GPU node by node", "sgling.bench.round_command"),
    "sweep depth": Command(
        "[MODEL] [flags]",
        "measure every draft depth, write the table of --speculative-depth auto",
        "sgling.bench.depth_sweep",
    ),
    "sweep rows": Command(
        "[MODEL] [flags]", "measure DSPARK rounds by verify rows, write the table of scheduling", "sgling.sweep_rows"
    ),
    "fit-confidence": Command(
        "[MODEL] [flags]", "calibrate the confidence of a DSPARK drafter on prompts", "sgling.fit_confidence"
    ),
    "train-draft dspark": Command(
        "[flags]", "train a DSPARK drafter on what the target says, export and check it", "sgling.train_draft"
    ),
    "train-draft nextn": Command("[flags]", "train the target's NEXTN layer the same way", "sgling.train_draft"),
    "train-draft ablate": Command(
        "PLAN [flags]", "rank small variants of a drafter and write the table", "sgling.train_draft"
    ),
    "trace": Command(
        "[MODEL] [flags]", "record decode rounds: a Perfetto trace and a picture of one", "sgling.bench.trace"
    ),
    "ab": Command(
        "A B [flags]", "compare two recorded runs or two servers on step time, noise known", "sgling.bench.ab_command"
    ),
    "gate correctness": Command(
        "[flags]",
        "check greedy answers against a golden, and that nothing pollutes them",
        "sgling.bench.gate.correctness_command",
    ),
    "gate contract": Command(
        "[FILE] [flags]", "check a server against bounds per scenario and concurrency", "sgling.bench.contract.command"
    ),
    "eval gsm8k": Command("[flags]", "few-shot mathematics, as upstream's script", "sgling.bench.evals.gsm8k"),
    "eval tools": Command("[flags]", "tool calls: exact, well-formed, offered", "sgling.bench.evals.tools"),
    "eval drafters": Command(
        "[flags]", "NEXTN and DSPARK drafters side by side on the embedded model", "sgling.bench.evals.drafters"
    ),
    "eval pico": Command("[flags]", "the gates of the embedded model", "sgling.bench.evals.pico"),
}


def usage() -> str:
    """The command list."""
    calls = {name: f"{name} {command.arguments}" for name, command in COMMANDS.items()}
    width = max(map(len, calls.values()))
    lines = [f"  {calls[name]:<{width}} {command.does}" for name, command in COMMANDS.items()]
    last = "sgling COMMAND --help lists a command's flags; sgling --version prints the version."
    return "\n".join(["usage: sgling COMMAND ...", "", "commands:", *lines, "", last])


def _usage_error(message: str) -> int:
    print(f"{usage()}\nsgling: error: {message}", file=sys.stderr)
    return 2


def _after_broken_pipe() -> int:
    """Nobody reads the output any more (``| head``): say nothing, also when the interpreter flushes at its end."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _run(name: str, argv: list[str]) -> int:
    module = import_module(COMMANDS[name].module)
    if name == "serve":
        return module.main(argv, "sgling serve", "model_path")
    if name.startswith("train-draft "):
        return module.main(argv, name.split()[1])
    return module.main(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console script; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        return _usage_error("no command")
    if argv[0] in ("--version", "-V"):
        print(f"sgling {__version__}")
        return 0
    if argv[0] in ("--help", "-h"):
        print(usage())
        return 0
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in COMMANDS:
            try:
                status = _run(name, argv[words:])
                sys.stdout.flush()
                return status
            except KeyboardInterrupt:
                return 128 + signal.SIGINT
            except BrokenPipeError:
                return _after_broken_pipe()
    kinds = [name.split()[1] for name in COMMANDS if name.startswith(f"{argv[0]} ")]
    if kinds:
        given = f"has no kind {argv[1]!r}" if len(argv) > 1 else "needs a kind"
        return _usage_error(f"{argv[0]} {given}: {', '.join(kinds)}")
    return _usage_error(f"unknown command {argv[0]!r}")


if __name__ == "__main__":
    sys.exit(main())
