"""From window logits to the verdict: which variant runs, what is counted, which logprobs are returned."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.core.step import LogprobRequest, LogprobTensors, PrefillInput, StepInput, StepOutput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling_kernel.sampling import (
    AdjustInputs,
    SamplingFlags,
    adjust_logits,
    commit_counts,
    token_logprobs,
    top_logprobs,
)
from sgling_kernel.verdict import Verdict, verdict_greedy, verdict_sampled, without_padding

PROMPT_LOGPROB_ROWS = 256  # prompt rows whose logits exist at the same time


class WindowLogits(NamedTuple):
    """Logits of a window and what they belong to.

    Attributes:
        logits: fp32 [bs*W, V_local].
        candidates: int64 [bs, W], root and drafts.
        positions: int64 [bs*W], position of each row.
        rows: int64 [bs], request rows; 0 marks a padded row.
    """

    logits: torch.Tensor
    candidates: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor


def choose_tokens(runner: ModelRunner, window: WindowLogits, flags: SamplingFlags) -> Verdict:
    """The verdict of a window: greedy variant when no request needs more, else the sampled one.

    Padded rows accept nothing.
    """
    if any(flags):
        verdict = verdict_sampled(window.logits, adjust_inputs(runner, window), flags, runner.reduce)
        return without_padding(verdict, window.rows)
    return verdict_greedy(window.logits, window.candidates, runner.reduce, runner.model.vocab_range[0], window.rows)


def count_emitted(runner: ModelRunner, window: WindowLogits, verdict: Verdict, flags: SamplingFlags) -> None:
    """Enter emitted tokens into the penalty counts; after :func:`window_logprobs`, which needs the counts before."""
    if flags.penalties:
        tables = runner.sampling.tables
        commit_counts(tables.counts, window.rows, verdict.target_ids, verdict.accept_lens, tables.vocab_start)


def adjust_inputs(runner: ModelRunner, window: WindowLogits) -> AdjustInputs:
    """What the sampling operators read of a window."""
    return AdjustInputs(runner.sampling.tables, window.rows, window.candidates, window.positions)


def window_logprobs(
    runner: ModelRunner,
    window: WindowLogits,
    target_ids: torch.Tensor,
    flags: SamplingFlags,
    wanted: LogprobRequest | None,
) -> LogprobTensors | None:
    """Logprobs of the target ids under the tempered, adjusted distribution (greedy rows: temperature 1).

    None when nobody asks.
    """
    if wanted is None:
        return None
    logits = window.logits
    if any(flags):
        tables = runner.sampling.tables
        temperature = tables.temperature[window.rows]
        temperature = torch.where(temperature > 0, temperature, 1.0).repeat_interleave(
            window.candidates.shape[1], output_size=logits.shape[0]
        )
        logits = adjust_logits(logits, adjust_inputs(runner, window), flags) / temperature.unsqueeze(-1)
    return _logprobs(runner, logits, target_ids.reshape(-1), wanted)


def window_result(
    runner: ModelRunner, window: WindowLogits, verdict: Verdict, step: StepInput | PrefillInput
) -> StepOutput:
    """What the host gets of a window; also enters the emitted tokens into the penalty counts."""
    logprobs = window_logprobs(runner, window, verdict.target_ids, step.flags, step.logprobs)
    count_emitted(runner, window, verdict, step.flags)
    return StepOutput(verdict.target_ids, verdict.accept_lens, logprobs, None)


def _logprobs(runner: ModelRunner, logits: torch.Tensor, ids: torch.Tensor, wanted: LogprobRequest) -> LogprobTensors:
    start, count = runner.model.vocab_range[0], logits.shape[0]
    extra_ids = runner.to_device(list(wanted.token_ids)).expand(count, -1)
    columns = torch.cat((ids.unsqueeze(-1), extra_ids), dim=-1)
    values = token_logprobs(logits, columns, runner.reduce, start)
    top_values, top_ids = top_logprobs(logits, wanted.top_k, runner.reduce, start)
    return LogprobTensors(values[:, 0], top_values, top_ids, values[:, 1:])


def prompt_logprobs(
    runner: ModelRunner, step: PrefillInput, batch: ForwardBatch, hidden: torch.Tensor
) -> LogprobTensors | None:
    """Logprobs of the prompt tokens predicted by rows ``prompt_logprob_start ..`` of the chunk, a few rows at a time.

    Row i predicts the next row's token; the last row predicts ``next_token``, or output when it ends the prompt.
    """
    if step.prompt_logprob_start is None:
        return None
    last = hidden.shape[0] if step.next_token is not None else hidden.shape[0] - 1
    following = runner.to_device([*step.token_ids[1:], step.next_token or 0])
    parts = []
    for first in range(step.prompt_logprob_start, last, PROMPT_LOGPROB_ROWS):
        rows = slice(first, min(first + PROMPT_LOGPROB_ROWS, last))
        parts.append(_logprobs(runner, runner.model.logits(hidden[rows]), following[rows], step.logprobs))
    return LogprobTensors(*(torch.cat(field) for field in zip(*parts, strict=True)))
