"""Logit adjustments before sampling: penalties, bias, minimum length, vocabulary mask.

Penalties count tokens exactly under speculation: row j of a window sees the committed counts plus drafts 1 .. j.
"""

from __future__ import annotations

import torch

from sgling_kernel.sampling.types import AdjustInputs, SamplingFlags


def adjust_logits(logits: torch.Tensor, inputs: AdjustInputs, flags: SamplingFlags) -> torch.Tensor:
    """Adjusted logits fp32 [N, V_local], a new tensor unless nothing applies; neutral rows keep their bits.

    Order: repetition penalty (prompt and output tokens: positive logits / r, others * r), frequency * count and
    presence * (count > 0) over output tokens, logit bias, then -inf for stop tokens below the minimum length and for
    tokens outside the vocabulary mask. ``logits`` is fp32 [N, V_local].
    """
    tables = inputs.tables
    batch, width = inputs.candidates.shape
    x = logits.view(batch, width, -1)
    if flags.penalties:
        x = _penalize(x, inputs)
    if flags.logit_bias:
        bias = tables.bias[inputs.rows].unsqueeze(1)
        x = torch.where(bias == 0, x, x + bias)  # -0.0 + 0.0 would change the sign bit
    if flags.min_tokens:
        limit = tables.min_len_limit[inputs.rows].unsqueeze(-1)
        short = inputs.positions.view(batch, width) + 1 < limit
        x = x.masked_fill(tables.stop_mask[inputs.rows].unsqueeze(1) & short.unsqueeze(-1), -torch.inf)
    if inputs.vocab_mask is not None:
        allowed = _unpack_mask(inputs.vocab_mask, tables.vocab_start, logits.shape[-1])
        x = x.masked_fill(~allowed.view_as(x), -torch.inf)
    return x.view_as(logits)


def commit_counts(
    counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, accept_lens: torch.Tensor, vocab_start: int
) -> None:
    """Add the emitted tokens of a step to ``counts`` int32 [R, V_local], in place.

    ``tokens`` int64 [bs, W] are the target ids of the window (prefill: W = 1, the first token), of which the first
    ``accept_lens`` int64 [bs] count; ``rows`` int64 [bs]. Ids of other vocabulary shards are left to their ranks.
    """
    vocab_size = counts.shape[1]
    column = tokens - vocab_start
    step = torch.arange(tokens.shape[1], device=tokens.device)
    counted = (step < accept_lens.unsqueeze(-1)) & (column >= 0) & (column < vocab_size)
    index = rows.unsqueeze(-1) * vocab_size + column.clamp(0, vocab_size - 1)
    counts.view(-1).scatter_add_(0, index.flatten(), counted.to(counts.dtype).flatten())


def _penalize(x: torch.Tensor, inputs: AdjustInputs) -> torch.Tensor:
    """Repetition, then frequency and presence penalties on ``x`` [bs, W, V_local]."""
    tables, rows = inputs.tables, inputs.rows

    def scalar(table: torch.Tensor) -> torch.Tensor:
        return table[rows].view(-1, 1, 1)

    counts = tables.counts[rows].unsqueeze(1) + _window_counts(inputs, x.shape[-1])
    emitted = counts > 0
    repetition = scalar(tables.repetition_penalty)
    seen = emitted | tables.prompt_seen[rows].unsqueeze(1)
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - (scalar(tables.frequency_penalty) * counts + scalar(tables.presence_penalty) * emitted)


def _window_counts(inputs: AdjustInputs, vocab_size: int) -> torch.Tensor:
    """int32 [bs, W, V_local]: how often each token occurs among drafts 1 .. j of row j's window."""
    candidates = inputs.candidates
    batch, width = candidates.shape
    step = torch.arange(width, device=candidates.device)
    column = candidates - inputs.tables.vocab_start
    local = (column >= 0) & (column < vocab_size)
    before = (step.unsqueeze(0) <= step.unsqueeze(1)) & (step > 0)  # [row j, draft i]
    index = column.clamp(0, vocab_size - 1).unsqueeze(1).expand(batch, width, width)
    ones = (before & local.unsqueeze(1)).int()
    window = torch.zeros(batch, width, vocab_size, dtype=torch.int32, device=candidates.device)
    return window.scatter_add_(2, index, ones)


def _unpack_mask(vocab_mask: torch.Tensor, vocab_start: int, vocab_size: int) -> torch.Tensor:
    """bool [N, V_local] from the packed mask of the whole vocabulary."""
    ids = torch.arange(vocab_start, vocab_start + vocab_size, device=vocab_mask.device)
    words = vocab_mask[:, ids >> 5]
    return ((words >> (ids & 31).int()) & 1).bool()
