"""Resolves the speculative flags into the numbers the runtime works with.

Terms (chain speculation): ``num_steps`` = drafts per round k; ``width`` = W = k + 1 rows per request in a verify, the
root token included. Width 1 is speculation with nothing drafted: the same round, no guess. DSPARK drafts a block of
gamma tokens in one step (``num_steps`` 1) and its width, gamma + 1, comes from the drafter's config.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from sgling.srt.config.depth_table import DepthTable, read_depth_table
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.dspark_options import DSparkOptions, dspark_options, refuse_dspark_flags
from sgling.srt.config.flags import ServerArgsError

logger = logging.getLogger(__name__)

MAX_WIDTH = 8
DEFAULT_NUM_STEPS = 3
DEFAULT_RING_LENGTH = 16
_NOT_BUILT = ("EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "UNO")
_TRIPLE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


@dataclass(frozen=True)
class SpecConfig:
    """Resolved speculation.

    Attributes:
        algorithm: "NEXTN", "DSPARK", or None when speculation is off (plain decode, no drafter is loaded).
        num_steps: draft steps per round: k >= 0 of NEXTN, 1 of DSPARK.
        topk: branches per step, always 1.
        width: rows per request in a verify, drafts + 1; 1 when speculation is off. DSPARK: what was asked for, or 0,
            until :func:`complete_spec_config` has seen the drafter.
        rollback: "replay" or "staged".
        ring_length: entries of the replay ring, a power of two >= 2 * width (DSPARK: as for width).
        depth: "fixed" = every step has ``width`` rows per request, "auto" = 1 to ``width`` of them, step by step,
            by what was accepted; "confidence" = the same for a single request, by what the DSPARK drafter expects.
        depth_table: step times for auto and confidence, None = measure them at start.
        dspark: everything about the DSPARK drafter once it is known, None for other algorithms.
    """

    algorithm: str | None
    num_steps: int
    topk: int
    width: int
    rollback: str
    ring_length: int
    depth: str = "fixed"
    depth_table: DepthTable | None = None
    dspark: DSparkOptions | None = None

    @property
    def enabled(self) -> bool:
        """Whether a drafter runs."""
        return self.algorithm is not None

    @property
    def num_draft_tokens(self) -> int:
        """Upstream's name of the verify width."""
        return self.width

    @property
    def drafter(self) -> DSparkConfig | None:
        """Shape of the DSPARK drafter, None as ``dspark``."""
        return self.dspark.drafter if self.dspark else None

    @property
    def window(self) -> int:
        """Positions a round may touch behind the committed length: verify rows, or a longer draft block."""
        return max(self.width, self.drafter.block_rows if self.drafter else 0)


def resolve_spec_config(args, embedded_model: bool) -> SpecConfig:
    """Apply upstream's rules to the speculative flags of ``args`` (any object with their attributes).

    ``embedded_model``: the model ships a trained NEXTN layer with this package, so speculation is on unless
    ``--speculative-algorithm none``. Raises :class:`ServerArgsError`; logs the corrections upstream makes silently.
    """
    algorithm = _resolve_algorithm(args.speculative_algorithm, embedded_model)
    depth = _resolve_depth(args, algorithm)
    table = read_depth_table(args.speculative_depth_table) if args.speculative_depth_table else None
    if algorithm is None:
        given = [name for name in _TRIPLE if getattr(args, name) is not None]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ServerArgsError(f"{flags}: only with --speculative-algorithm, and it is off")
        steps = 0
    elif algorithm == "DSPARK":
        return replace(_resolve_dspark(args), depth=depth, depth_table=table)
    else:
        steps = _resolve_steps(args, _default_steps(depth, table))
    refuse_dspark_flags(args)
    width = steps + 1
    spec = SpecConfig(algorithm, steps, 1, width, *_resolve_rollback(args, width, DEFAULT_RING_LENGTH))
    return replace(spec, depth=depth, depth_table=_checked_table(table, width)) if depth == "auto" else spec


def _resolve_depth(args, algorithm: str | None) -> str:
    """How the width of a step is chosen; raises where there is nothing to choose."""
    depth = "auto" if args.speculative_adaptive else args.speculative_depth
    if args.speculative_adaptive and args.speculative_depth == "confidence":
        raise ServerArgsError("--speculative-adaptive contradicts --speculative-depth confidence")
    if depth == "auto" and algorithm is None:
        raise ServerArgsError("--speculative-depth auto: only with --speculative-algorithm, and it is off")
    if depth == "confidence" and algorithm != "DSPARK":
        raise ServerArgsError("--speculative-depth confidence: only with --speculative-algorithm DSPARK")
    if args.speculative_depth_table is not None and depth == "fixed":
        raise ServerArgsError("--speculative-depth-table: only with --speculative-depth auto")
    return depth


def _default_steps(depth: str, table: DepthTable | None) -> int:
    """Draft depth when none is given: with auto as deep as is measured, or as can be built."""
    if depth != "auto":
        return DEFAULT_NUM_STEPS
    return MAX_WIDTH - 1 if table is None else min(table.max_width, MAX_WIDTH) - 1


def _checked_table(table: DepthTable | None, width: int) -> DepthTable | None:
    """Raises unless there is something to choose and the table, if one is given, covers it."""
    if width == 1:
        raise ServerArgsError("--speculative-depth auto needs --speculative-num-steps of at least 1")
    if table is not None and table.max_width < width:
        raise ServerArgsError(
            f"--speculative-depth-table covers widths 1 to {table.max_width}, and --speculative-num-steps {width - 1} "
            f"asks for {width}; sweep again with --max-steps {width - 1}"
        )
    return table


def complete_spec_config(args, drafter: DSparkConfig) -> SpecConfig:
    """Speculation of ``args`` (resolved, DSPARK) with what the drafter's config decides: width and ring length.

    Raises :class:`ServerArgsError` for a flag that contradicts the drafter.
    """
    options = dspark_options(args, drafter)
    width = options.drafts + 1
    if args.speculative_num_draft_tokens not in (None, width):
        raise ServerArgsError(
            f"--speculative-num-draft-tokens {args.speculative_num_draft_tokens}: must be {width}, block size + 1"
        )
    ring = max(DEFAULT_RING_LENGTH, 1 << (2 * width - 1).bit_length())
    rollback, ring = _resolve_rollback(args, width, ring)
    table = _checked_table(args.spec.depth_table, width)
    return replace(args.spec, width=width, rollback=rollback, ring_length=ring, depth_table=table, dspark=options)


def _resolve_dspark(args) -> SpecConfig:
    """What the flags alone decide; upstream forces steps and topk to 1."""
    for name in _TRIPLE[:2]:
        if getattr(args, name) not in (None, 1):
            logger.warning("--%s corrected to 1: DSPARK drafts a block in one step", name.replace("_", "-"))
    rollback, _ = _resolve_rollback(args, 0, DEFAULT_RING_LENGTH)
    width, ring = args.speculative_num_draft_tokens or 0, args.linear_replayssm_cache_len or 0
    return SpecConfig("DSPARK", 1, 1, width, rollback, ring)


def _resolve_algorithm(name: str | None, embedded_model: bool) -> str | None:
    if name is None:
        return "NEXTN" if embedded_model else None
    upper = name.upper()
    if upper == "NONE":
        return None
    if upper in ("NEXTN", "EAGLE"):
        return "NEXTN"
    if upper == "DSPARK":
        return "DSPARK"
    if upper in _NOT_BUILT:
        raise ServerArgsError(f"--speculative-algorithm {name}: {upper} is not built yet; NEXTN, DSPARK and none are")
    raise ServerArgsError(f"--speculative-algorithm {name}: unknown; known are NEXTN, EAGLE, DSPARK, none")


def _resolve_steps(args, default: int) -> int:
    """Draft depth under upstream's rules of the (steps, topk, draft tokens) triple."""
    steps, topk, tokens = (getattr(args, name) for name in _TRIPLE)
    if steps is None:
        if topk is not None or tokens is not None:
            raise ServerArgsError(
                "--speculative-num-steps must be set when --speculative-eagle-topk or --speculative-num-draft-tokens is"
            )
        return default
    if topk not in (None, 1):
        raise ServerArgsError(f"--speculative-eagle-topk {topk}: only chains (1) are built, trees are refused")
    if not 0 <= steps < MAX_WIDTH:
        raise ServerArgsError(f"--speculative-num-steps {steps}: must be 0 to {MAX_WIDTH - 1}")
    if tokens not in (None, steps + 1):
        logger.warning(
            "--speculative-num-draft-tokens %d corrected to %d: with topk 1 it is num-steps + 1", tokens, steps + 1
        )
    return steps


def with_default_rollback(spec: SpecConfig, args, on_cpu: bool) -> SpecConfig:
    """The scheme of the device where no flag names one: staged on a CPU (docs/decisions/0006-cpu-operators.md)."""
    named = args.linear_rollback or args.enable_linear_replayssm_spec or args.linear_replayssm_cache_len is not None
    return replace(spec, rollback="staged") if on_cpu and not named else spec


def _resolve_rollback(args, width: int, default_ring: int) -> tuple[str, int]:
    """(scheme, ring length); ``default_ring`` is used when no length is given, replay when no scheme is."""
    if args.linear_rollback == "staged":
        for name in ("enable_linear_replayssm_spec", "linear_replayssm_cache_len"):
            if getattr(args, name):
                raise ServerArgsError(f"--{name.replace('_', '-')} contradicts --linear-rollback staged")
    ring = default_ring if args.linear_replayssm_cache_len is None else args.linear_replayssm_cache_len
    if ring <= 0 or ring & (ring - 1):
        raise ServerArgsError(f"--linear-replayssm-cache-len {ring}: must be a power of two")
    if ring < 2 * width:
        raise ServerArgsError(
            f"--linear-replayssm-cache-len {ring}: must be at least {2 * width}, twice the verify width {width}"
        )
    return args.linear_rollback or "replay", ring
