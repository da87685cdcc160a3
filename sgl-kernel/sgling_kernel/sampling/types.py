"""Typed inputs of the sampling operators: per-request tables, host flags, and reductions over vocabulary shards."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class ShardReduce(Protocol):
    """Reductions over the vocabulary shards; every rank gets the same, order-independent result."""

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over shards, any shape."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over shards, any shape; the operators here only sum integers, hence exactly."""

    def best(self, score: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(score fp32 [N], id int64 [N]) of the highest score; the lowest id wins ties."""


class SingleShard:
    """:class:`ShardReduce` of an unsharded vocabulary: every reduction is the identity."""

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        return x

    def best(self, score: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pair."""
        return score, ids


class SamplingFlags(NamedTuple):
    """What at least one row of a batch needs; False skips the work for all rows. Host booleans, a graph key.

    Attributes:
        sampled: a temperature above 0.
        penalties: frequency, presence or repetition penalty (needs ``counts`` and ``prompt_seen``).
        logit_bias: needs ``bias``.
        min_tokens: a minimum length (needs ``stop_mask``).
        top_k, top_p, min_p: the filter of that name.
    """

    sampled: bool = False
    penalties: bool = False
    logit_bias: bool = False
    min_tokens: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    def union(self, other: SamplingFlags) -> SamplingFlags:
        """Flags of both batches together."""
        return SamplingFlags(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


class SamplingTables(NamedTuple):
    """Sampling parameters on the device, one entry per request row; row 0 is the neutral dummy of padded rows.

    Attributes:
        temperature: fp32 [R], 0 = greedy.
        top_k: int64 [R], values below 1 = off.
        top_p: fp32 [R], 1 = off.
        min_p: fp32 [R], 0 = off.
        seed: int64 [R].
        frequency_penalty, presence_penalty: fp32 [R], 0 = off.
        repetition_penalty: fp32 [R], 1 = off.
        min_len_limit: int64 [R], first position at which a stop token may be emitted; 0 = off.
        vocab_start: first token id of this rank's vocabulary shard.
        counts: int32 [R, V_local], how often each token was emitted; None until a request needs it.
        prompt_seen: bool [R, V_local], tokens of the prompt; None as above.
        bias: fp32 [R, V_local], logit bias; None as above.
        stop_mask: bool [R, V_local], tokens masked below the limit (EOS and stop ids); None as above.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    frequency_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    repetition_penalty: torch.Tensor
    min_len_limit: torch.Tensor
    vocab_start: int
    counts: torch.Tensor | None
    prompt_seen: torch.Tensor | None
    bias: torch.Tensor | None
    stop_mask: torch.Tensor | None


class AdjustInputs(NamedTuple):
    """Which request and window each logits row belongs to (N = bs * W rows, request-major).

    Attributes:
        tables: see :class:`SamplingTables`.
        rows: int64 [bs], request rows.
        candidates: int64 [bs, W], column 0 = root (already in ``counts``), columns 1.. = drafts of this window.
        positions: int64 [N], position of each row; it predicts the token at ``position + 1``.
        vocab_mask: int32 [N, ceil(V / 32)] over the whole vocabulary, bit ``v % 32`` of word ``v // 32`` set = allowed;
            None without a grammar.
    """

    tables: SamplingTables
    rows: torch.Tensor
    candidates: torch.Tensor
    positions: torch.Tensor
    vocab_mask: torch.Tensor | None = None
