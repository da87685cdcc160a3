"""Resolves the speculative flags into the numbers the runtime works with.

Terms (chain speculation): ``num_steps`` = drafts per round k; ``width`` = W = k + 1 rows per request in a verify, the
root token included. Width 1 is speculation with nothing drafted: the same round, no guess.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sgling.srt.config.flags import ServerArgsError

logger = logging.getLogger(__name__)

MAX_WIDTH = 8
DEFAULT_NUM_STEPS = 3
DEFAULT_RING_LENGTH = 16
_NOT_BUILT = ("DSPARK", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "UNO")
_TRIPLE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


@dataclass(frozen=True)
class SpecConfig:
    """Resolved speculation.

    Attributes:
        algorithm: "NEXTN", or None when speculation is off (plain decode, no drafter is loaded).
        num_steps: drafts per round, k >= 0.
        topk: branches per step, always 1.
        width: rows per request in a verify, k + 1; 1 when speculation is off.
        rollback: "replay" or "staged".
        ring_length: entries of the replay ring, a power of two >= 2 * width.
    """

    algorithm: str | None
    num_steps: int
    topk: int
    width: int
    rollback: str
    ring_length: int

    @property
    def enabled(self) -> bool:
        """Whether a drafter runs."""
        return self.algorithm is not None

    @property
    def num_draft_tokens(self) -> int:
        """Upstream's name of the verify width."""
        return self.width


def resolve_spec_config(args, embedded_model: bool) -> SpecConfig:
    """Apply upstream's rules to the speculative flags of ``args`` (any object with their attributes).

    ``embedded_model``: the model ships a trained NEXTN layer with this package, so speculation is on unless
    ``--speculative-algorithm none``. Raises :class:`ServerArgsError`; logs the corrections upstream makes silently.
    """
    algorithm = _resolve_algorithm(args.speculative_algorithm, embedded_model)
    if algorithm is None:
        given = [name for name in _TRIPLE if getattr(args, name) is not None]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ServerArgsError(f"{flags}: only with --speculative-algorithm, and it is off")
        steps = 0
    else:
        steps = _resolve_steps(args)
    width = steps + 1
    return SpecConfig(algorithm, steps, 1, width, *_resolve_rollback(args, width))


def _resolve_algorithm(name: str | None, embedded_model: bool) -> str | None:
    if name is None:
        return "NEXTN" if embedded_model else None
    upper = name.upper()
    if upper == "NONE":
        return None
    if upper in ("NEXTN", "EAGLE"):
        return "NEXTN"
    if upper in _NOT_BUILT:
        raise ServerArgsError(f"--speculative-algorithm {name}: {upper} is not built yet; NEXTN and none are")
    raise ServerArgsError(f"--speculative-algorithm {name}: unknown; known are NEXTN, EAGLE, none")


def _resolve_steps(args) -> int:
    """Draft depth under upstream's rules of the (steps, topk, draft tokens) triple."""
    steps, topk, tokens = (getattr(args, name) for name in _TRIPLE)
    if steps is None:
        if topk is not None or tokens is not None:
            raise ServerArgsError(
                "--speculative-num-steps must be set when --speculative-eagle-topk or --speculative-num-draft-tokens is"
            )
        return DEFAULT_NUM_STEPS
    if topk not in (None, 1):
        raise ServerArgsError(f"--speculative-eagle-topk {topk}: only chains (1) are built, trees are refused")
    if not 0 <= steps < MAX_WIDTH:
        raise ServerArgsError(f"--speculative-num-steps {steps}: must be 0 to {MAX_WIDTH - 1}")
    if tokens not in (None, steps + 1):
        logger.warning(
            "--speculative-num-draft-tokens %d corrected to %d: with topk 1 it is num-steps + 1", tokens, steps + 1
        )
    return steps


def _resolve_rollback(args, width: int) -> tuple[str, int]:
    """(scheme, ring length)."""
    if args.linear_rollback == "staged":
        for name in ("enable_linear_replayssm_spec", "linear_replayssm_cache_len"):
            if getattr(args, name):
                raise ServerArgsError(f"--{name.replace('_', '-')} contradicts --linear-rollback staged")
    ring = DEFAULT_RING_LENGTH if args.linear_replayssm_cache_len is None else args.linear_replayssm_cache_len
    if ring <= 0 or ring & (ring - 1):
        raise ServerArgsError(f"--linear-replayssm-cache-len {ring}: must be a power of two")
    if ring < 2 * width:
        raise ServerArgsError(
            f"--linear-replayssm-cache-len {ring}: must be at least {2 * width}, twice the verify width {width}"
        )
    return args.linear_rollback, ring
