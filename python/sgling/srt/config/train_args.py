"""Flags of the training programs, ``sgling.training.pretrain`` and ``sgling.training.tokenizer``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sgling.srt.config.flags import build_parser, flag, parse_flags


class _Command:
    """Reads itself from a command line."""

    @classmethod
    def parse(cls, prog: str, argv: Sequence[str] | None = None) -> Self:
        """From ``argv`` (default: this process' arguments). Exits with status 2 on unknown flags."""
        parser = build_parser(cls, f"python -m {prog}", (cls.__doc__ or "").splitlines()[0])
        return cls(**parse_flags(parser, sys.argv[1:] if argv is None else argv))


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(_Command):
    """Trains ling3-pico: joint trunk + NEXTN stage, NEXTN chain stage on the frozen trunk, export, evaluation."""

    output: Path = flag(Path("ling3-pico-run"), "folder of metrics, checkpoint and exported model")
    seconds: float = flag(355.0, "wall time of the joint stage; 0 skips it")
    nextn_seconds: float = flag(85.0, "wall time of the NEXTN stage; 0 skips it")
    steps: int | None = flag(None, "steps of the joint stage instead of wall time")
    nextn_steps: int | None = flag(None, "steps of the NEXTN stage instead of wall time")
    tokens: int = flag(131072, "tokens a step")
    row: int = flag(1024, "row length of the NEXTN stage, tokens")
    chain: int = flag(5, "self-fed steps of the NEXTN loss")
    workers: int = flag(0, "processes that make data; 0 makes it in this process")
    seed: str = flag("pico-1", "seed of the data stream")
    compile: bool = flag(False, "use torch.compile (GPU)")
    init: Path | None = flag(None, "folder of an exported model to start from")
    resume: Path | None = flag(None, "checkpoint of an interrupted run to continue")
    rate: float = flag(1.0, "factor on the joint stage's learning rates")
    prompt_weight: float = flag(0.2, "weight of prompt tokens in the joint loss; 0 in the stage's last fifth")
    evaluate: int = flag(0, "held-out samples a scenario; 0 skips the evaluation")
    evaluate_length: int = flag(1280, "prompt and answer in the evaluation, tokens")
    config: Path | None = flag(None, "folder of the config.json to train; default: the embedded model")
    log_every: int = flag(20, "steps between two lines of metrics.jsonl")


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions(_Command):
    """Trains the embedded model's tokenizer on generated text and the Python standard library."""

    output: Path | None = flag(None, "folder to write to; default: the embedded model")
    documents: int = flag(30_000, "documents to train on")


@dataclass(frozen=True, kw_only=True)
class DistinctOptions(_Command):
    """Counts how many samples of the generator are distinct."""

    samples: int = flag(1_000_000, "samples to draw per scenario")
    scenario: list[str] | None = flag(None, "scenarios to draw from; default: all but small talk")
