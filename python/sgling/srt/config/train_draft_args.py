"""Flags of ``sgling train-draft``: data, drafter shape, losses, schedule, and how ranks are shared out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from sgling.srt.config.dspark_config_readers import MARKOV_TYPES
from sgling.srt.config.flags import ServerArgsError, build_parser, field_default, flag, option_name, parse_flags
from sgling.srt.config.model_path import DEFAULT_MODEL

GENERATORS = ("batched", "engine")


class Split(NamedTuple):
    """``--split-serve``: ranks that train and ranks that run the target."""

    trainers: int
    engines: int


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """Where conversations come from and who answers them."""

    target: str = flag(DEFAULT_MODEL, "target the drafter sits on: embedded name or directory", "--model-path")
    output: Path = flag(Path("drafter-run"), "folder of pool, metrics, checkpoint and exported drafter")
    conversations: str | None = flag(
        None, 'JSONL file, each line {"messages": [...], "tools": [...]}; default: the built-in scenarios'
    )
    pool: list[str] | None = flag(None, "pool files of earlier runs to train on instead of making one")
    regenerate: int = flag(2000, "conversations whose last answer the target writes anew; 0 = none")
    regenerate_seconds: float | None = flag(None, "stop regenerating after this time")
    given: int = flag(0, "conversations whose answers are taken as they are (a warning says so)")
    given_share: float = flag(0.5, "share of a batch's conversations with given answers, when there are both kinds")
    temperatures: list[float] | None = flag(None, "sampling settings, taken in turn; default: 0 0 0.7 1.0")
    max_new_tokens: int = flag(1024, "tokens per regenerated answer, at most")
    generator: str = flag(
        "batched", "batched = the training forward on this device, engine = sgling.Engine", choices=GENERATORS
    )
    slots: int = flag(256, "conversations the batched generator answers at a time")
    fresh: bool = flag(False, "every batch is answered anew while training, no pool")
    fresh_conversations: int = flag(64, "conversations answered for one fresh batch")
    passes: int = flag(1, "times a batch is trained on, each with other anchors")
    eval_prompts: int = flag(4, "held-out prompts per scenario for the simulated accept length")


@dataclass(frozen=True, kw_only=True)
class ShapeArgs:
    """The drafter."""

    block_size: int = flag(8, "drafts per block")
    layers: int = flag(3, "drafter layers")
    mlp: int = flag(384, "width of the feed-forward")
    attention: str = flag("dense", "dense = grouped queries, mla = the target's gated MLA", choices=("dense", "mla"))
    kv_heads: int | None = flag(None, "key/value heads of dense attention; default: all heads")
    rope_style: str = flag("neox", "neox = half-split pairs, interleaved", choices=("neox", "interleaved"))
    rope_dim: int | None = flag(None, "rotated dimensions of a dense head; default: all")
    rope_theta: float = flag(10000.0, "base of the rotary embedding")
    taps: list[int] | None = flag(None, "target layers whose outputs are read (-1: embedding); default: spread")
    markov_type: str = flag("vanilla", "kind of the Markov head", choices=(*MARKOV_TYPES, "none"))
    markov_rank: int = flag(32, "rank of the Markov head")
    mask_token: str = flag("<|mask|>", "token that fills a block")
    no_confidence: bool = flag(False, "no confidence head")
    init: Path | None = flag(None, "drafter folder to start from; its config replaces the flags of the shape")
    chain: int = flag(7, "nextn: self-fed steps of the loss")


@dataclass(frozen=True, kw_only=True)
class LossArgs:
    """Weights of the loss terms (docs/training.md)."""

    ce: float = flag(0.1, "weight of the cross entropy to the text")
    l1: float = flag(0.9, "weight of the L1 distance to the target's distribution")
    confidence: float = flag(1.0, "weight of the confidence head's binary cross entropy")
    length: float = flag(0.1, "weight of the expected accepted length, from --length-from on")
    length_from: float = flag(0.5, "share of the run after which the length term counts")
    decay: float | None = flag(None, "position decay of the weights; default: half the block size")


@dataclass(frozen=True, kw_only=True)
class TrainDraftArgs(DataArgs, ShapeArgs, LossArgs):
    """Train a drafter of a target on text the target writes."""

    steps: int | None = flag(
        None, "optimizer steps, 0 = make the pool alone; default: 200, or as many as --seconds allow"
    )
    seconds: float | None = flag(None, "wall time of the training loop instead of --steps")
    row: int = flag(1024, "tokens of a row of packed conversations")
    rows: int = flag(4, "rows per optimizer step")
    batch_rows: int | None = flag(None, "rows per target forward, a multiple of --rows; default: --rows")
    anchors: int = flag(64, "blocks per row and step")
    rate: float = flag(1.0, "factor on the learning rates")
    seed: int = flag(0, "seed of data order, anchors and first weights")
    workers: int = flag(0, "processes that make conversations; 0 = this process")
    device: str = flag("auto", "cpu or cuda", choices=("auto", "cpu", "cuda"))
    compile: bool = flag(False, "torch.compile (GPU)")
    resume: bool = flag(False, "go on from the checkpoint in --output")
    log_every: int = flag(20, "steps between two lines of metrics.jsonl")
    eval_every: int = flag(500, "steps between two simulated accept lengths")
    save_every: float = flag(60.0, "seconds between two checkpoints")
    split_serve: str | None = flag(None, "N:M = N trainer ranks, M ranks that run the target")
    queue: int = flag(2, "split-serve: batches an engine rank may be ahead of a trainer")
    no_acceptance_check: bool = flag(False, "skip the check the server makes with an exported drafter")
    disable_tqdm: bool = flag(False, "no progress bar")

    @classmethod
    def read(cls, argv: Sequence[str], kind: str) -> TrainDraftArgs:
        """Read a command line; usage errors exit with status 2."""
        parser = build_parser(cls, f"sgling train-draft {kind}", cls.__doc__.splitlines()[0])
        args = cls(**parse_flags(parser, argv))
        if error := args.error() or args.unread(kind):
            parser.error(error)
        return args

    def unread(self, kind: str) -> str | None:
        """Flags that were given and that no drafter of this kind has."""
        others = [*fields(ShapeArgs), *fields(LossArgs)]
        names = [field for field in others if (field.name == "chain") == (kind == "dspark")]
        given = [option_name(field.name) for field in names if getattr(self, field.name) != field_default(field)]
        return f"{', '.join(given)}: not for {kind}" if given else None

    def error(self) -> str | None:
        """What is wrong with the flags together."""
        positive = ("row", "rows", "anchors", "block_size", "layers", "slots", "passes", "queue", "eval_prompts")
        for name in (*positive, "eval_every", "log_every", "max_new_tokens", "fresh_conversations", "chain"):
            if getattr(self, name) <= 0:
                return f"{option_name(name)} must be positive"
        for name in ("seconds", "regenerate_seconds", "rate", "decay"):
            if (value := getattr(self, name)) is not None and value <= 0:
                return f"{option_name(name)} must be positive"
        counts = ("steps", "regenerate", "given", "workers", "save_every")  # no steps: the pool alone is made
        for name in (*counts, *(field.name for field in fields(LossArgs))):
            if (getattr(self, name) or 0) < 0:
                return f"{option_name(name)} must not be negative"
        if min(self.settings) < 0:
            return "--temperatures must not be negative"
        if self.batch_rows is not None and (self.batch_rows <= 0 or self.batch_rows % self.rows):
            return f"--batch-rows {self.batch_rows} must be a multiple of --rows {self.rows}"
        if not 0 <= self.given_share <= 1:
            return "--given-share must lie in 0 ... 1"
        if self.steps is not None and self.seconds is not None:
            return "--steps and --seconds exclude each other"
        if self.fresh and self.pool:
            return "--fresh answers every batch anew: it takes no --pool"
        try:
            self.split()
        except ServerArgsError as error:
            return str(error)
        return None

    def split(self) -> Split | None:
        """Ranks of ``--split-serve``; raises ServerArgsError for text that is not N:M."""
        if self.split_serve is None:
            return None
        parts = self.split_serve.split(":")
        if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
            raise ServerArgsError(f"--split-serve {self.split_serve!r}: give N:M, both at least 1")
        return Split(*map(int, parts))

    @property
    def target_rows(self) -> int:
        """Rows of one target forward."""
        return self.batch_rows or self.rows

    @property
    def settings(self) -> tuple[float, ...]:
        """Sampling temperatures, taken in turn."""
        return tuple(self.temperatures or (0.0, 0.0, 0.7, 1.0))


@dataclass(frozen=True, kw_only=True)
class AblateArgs:
    """Train small variants of one drafter and rank them."""

    plan: Path | None = flag(None, "YAML file: base flags and variants")
    output: Path = flag(Path("ablation-run"), "folder of the runs")
    table: Path | None = flag(None, "Markdown file the ranking is written to; default: docs/drafter-ablation.md")
    seconds: float | None = flag(None, "training time of each variant, at most 60, in place of the plan's steps")
    pool: str | None = flag(None, "pool file to train on; default: one made with the base's flags")
    parallel: int = flag(1, "variants at a time, in turn over the visible GPUs")
    only: list[str] | None = flag(None, "names of variants to run; default: all")

    @classmethod
    def read(cls, argv: Sequence[str]) -> AblateArgs:
        """Read a command line; usage errors exit with status 2."""
        parser = build_parser(cls, "sgling train-draft ablate", cls.__doc__.splitlines()[0], "plan")
        args = cls(**parse_flags(parser, argv))
        if args.plan is None:
            parser.error("a plan is needed")
        if args.parallel <= 0:
            parser.error("--parallel must be positive")
        return args
