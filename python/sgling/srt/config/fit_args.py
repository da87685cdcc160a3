"""Flags of ``sgling fit-confidence``: prompts, output file, and every flag of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.flags import ServerArgsError, flag
from sgling.srt.config.server_args import ServerArgs


@dataclass(frozen=True, kw_only=True)
class FitArgs(ServerArgs):
    """Calibrate the confidence of a DSPARK drafter on prompts."""

    prompts: str | None = flag(None, 'JSONL file, each line {"prompt": text} or {"input_ids": [...]}')
    output: str | None = flag(None, "JSON file to write")
    max_new_tokens: int = flag(256, "tokens to generate per prompt, at most")
    temperature: float = flag(1.0, "sampling temperature: calibrate on the mix you serve")

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> FitArgs:
        """Read a command line (usage errors exit with status 2); raises ServerArgsError for a missing file name."""
        args = cls.from_cli(argv, "sgling fit-confidence")
        for name in ("prompts", "output"):
            if getattr(args, name) is None:
                raise ServerArgsError(f"--{name} is needed")
        if args.spec.algorithm != "DSPARK":
            raise ServerArgsError("fit-confidence needs --speculative-algorithm DSPARK")
        return args
