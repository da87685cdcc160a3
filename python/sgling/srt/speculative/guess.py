"""How drafters turn logits into tokens: arg-max, under the very noise that the target will add."""

from __future__ import annotations

import torch

from sgling.srt.model_executor.model_runner import ModelRunner
from sgling_kernel.logits import Draws, argmax_lowest, best_token, drawn_scores
from sgling_kernel.sampling import SamplingFlags, SingleShard


def guess_tokens(
    runner: ModelRunner,
    logits: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    flags: SamplingFlags,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The drafter's guess of each row, int64 [bs]; sampled requests add the noise the target will add.

    Args:
        logits: fp32 [bs, V_local] of the drafter.
        positions: int64 [bs], position of the target row that draws the guessed token.
        rows: int64 [bs], request rows.
        flags: what the batch needs.
        ids: int64 [C], ascending token ids of the columns of ``logits``; None: the drafter's whole vocabulary shard.
    """
    start, size = runner.draft_model.vocab_range
    if flags.sampled:
        tables = runner.sampling.tables
        logits = drawn_scores(logits, Draws(tables.temperature, tables.seed, rows, positions, size), start, ids)
    score, column = argmax_lowest(logits)
    return runner.reduce.best(score, column + start if ids is None else ids[column])[1]


def guess_into(
    runner: ModelRunner,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    flags: SamplingFlags,
    out: torch.Tensor,
) -> None:
    """:func:`guess_tokens` of the NEXTN layer's rows ``hidden`` [bs, H], read by the next forward.

    ``out``: int64 [bs], may be strided. Greedy guesses of a whole vocabulary need no logits.
    """
    draft = runner.draft_model
    if not isinstance(runner.reduce, SingleShard):
        out.copy_(guess_tokens(runner, draft.logits(hidden), positions, rows, flags, draft.draft_ids))
    elif flags.sampled:
        tables = runner.sampling.tables
        draws = Draws(tables.temperature, tables.seed, rows, positions, draft.vocab_range[1])
        best_token(draft.logits(hidden), draft.vocab_range[0], out, draft.draft_ids, draws)
    else:
        draft.best_token(hidden, out)
