"""Flags of ``sgling generate``: one prompt, its sampling, and every flag of the server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sgling.srt.config.flags import flag
from sgling.srt.config.server_args import ServerArgs


@dataclass(frozen=True, kw_only=True)
class GenerateArgs(ServerArgs):
    """Answer one prompt without a server."""

    prompt: str | None = flag(None, "the prompt")
    chat: bool = flag(False, "wrap the prompt as a user message with the model's chat template")
    max_new_tokens: int = flag(128, "tokens to generate, at most")
    temperature: float = flag(0.0, "0 = greedy")
    top_p: float = flag(1.0, "nucleus sampling")
    sampling_seed: int | None = flag(None, "seed of the sampled tokens")
    ignore_eos: bool = flag(False, "generate past the end token")

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> GenerateArgs:
        """Read a command line; usage errors (a missing prompt included) exit with status 2."""
        args = cls.parse(argv, "sgling generate", "prompt")
        if args.prompt is None:
            print('usage: sgling generate "prompt" [--flag VALUE ...]', file=sys.stderr)
            print("sgling generate: error: no prompt", file=sys.stderr)
            raise SystemExit(2)
        return args

    def sampling_params(self) -> dict:
        """The native sampling parameters."""
        params = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "ignore_eos": self.ignore_eos,
        }
        return params if self.sampling_seed is None else {**params, "sampling_seed": self.sampling_seed}
