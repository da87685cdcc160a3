"""Typed inputs and outputs of the device steps (prefill, draft, verify, extend, decode)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LogprobRequest(NamedTuple):
    """Which logprobs a step must return (host facts; the union over its requests).

    Attributes:
        top_k: alternatives per token, 0 for none.
        token_ids: extra token ids whose logprobs are wanted; () for none.
    """

    top_k: int
    token_ids: tuple[int, ...]


class StepInput(NamedTuple):
    """One decode step: which requests, how wide, and what the host knows about their lengths.

    Attributes:
        req_pool_indices: int64 [bs] on the device; 0 marks a padded row.
        width: W, rows per request (1: no drafts).
        kv_bound: host upper bound of every attended length.
        flags: sampling features any request needs (:class:`sgling_kernel.sampling.SamplingFlags`).
        logprobs: what to return, or None.
        verify_rows: rows that verify may spend over the whole batch, at least one per request; they go to the drafts
            most likely to survive. None: ``width`` rows for everybody, and no confidences are computed.
        seq_lens_cpu: exact committed lengths, only where an attention backend needs them on the host.
        packed: int64 [bs, W + 1], where the step also leaves tokens and accept lengths side by side, or None.
    """

    req_pool_indices: torch.Tensor
    width: int
    kv_bound: int
    flags: NamedTuple
    logprobs: LogprobRequest | None
    verify_rows: int | None = None
    seq_lens_cpu: tuple[int, ...] | None = None
    packed: torch.Tensor | None = None


class PrefillInput(NamedTuple):
    """One chunk of one request's prompt.

    Attributes:
        req_pool_idx: row of the request.
        state_slot: its KDA state slot.
        token_ids: the chunk's prompt ids.
        prefix_len: committed tokens before the chunk.
        next_token: first prompt id after the chunk, None when the chunk ends the prompt.
        flags, logprobs: as in :class:`StepInput`, for the first output token.
        prompt_logprob_start: index in the chunk of the first row whose prediction is wanted, or None.
    """

    req_pool_idx: int
    state_slot: int
    token_ids: list[int]
    prefix_len: int
    next_token: int | None
    flags: NamedTuple
    logprobs: LogprobRequest | None
    prompt_logprob_start: int | None


class LogprobTensors(NamedTuple):
    """Logprobs of M rows.

    Attributes:
        token: fp32 [M], logprob of the chosen token.
        top_values, top_ids: [M, k] alternatives, k may be 0.
        extra: fp32 [M, len(token_ids)].
    """

    token: torch.Tensor
    top_values: torch.Tensor
    top_ids: torch.Tensor
    extra: torch.Tensor


class VerifySchedule(NamedTuple):
    """What a scheduled verify did and what the next budgets are made of.

    Attributes:
        confidence: fp32 [bs, gamma], raw logits of the confidence head.
        verify_lens: int64 [bs], rows that were verified, 0 for padded rows.
    """

    confidence: torch.Tensor
    verify_lens: torch.Tensor


class StepOutput(NamedTuple):
    """What the host reads of a step, one step late.

    Attributes:
        tokens: int64 [bs, W]; the first ``accept_lens`` of a row are committed.
        accept_lens: int64 [bs], 0 for padded rows and for a prefill chunk that does not end its prompt.
        logprobs: rows bs*W in the order of ``tokens``, or None.
        prompt_logprobs: prefill only, rows of the chunk from ``prompt_logprob_start``, or None.
        packed: int64 [bs, W + 1], tokens and accept length side by side (the first two fields are views of it): this
            step's copy of what a graph left in its buffer. None when they are tensors of their own.
        schedule: confidences and verify lengths when the step asked for ``verify_rows``, or None.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    logprobs: LogprobTensors | None
    prompt_logprobs: LogprobTensors | None
    packed: torch.Tensor | None = None
    schedule: VerifySchedule | None = None
