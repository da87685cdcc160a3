"""How drafters turn logits into tokens: arg-max, under the very noise that the target will add."""

from __future__ import annotations

import torch

from sgling.srt.model_executor.model_runner import ModelRunner
from sgling_kernel.logits import argmax_lowest
from sgling_kernel.noise import gumbel_noise
from sgling_kernel.sampling import SamplingFlags


def guess_tokens(
    runner: ModelRunner, logits: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, flags: SamplingFlags
) -> torch.Tensor:
    """The drafter's guess of each row, int64 [bs]; sampled requests add the noise the target will add.

    Args:
        logits: fp32 [bs, V_local] of the drafter.
        positions: int64 [bs], position of the target row that draws the guessed token.
        rows: int64 [bs], request rows.
        flags: what the batch needs.
    """
    start, size = runner.draft_model.vocab_range
    if flags.sampled:
        tables = runner.sampling.tables
        temperature = tables.temperature[rows].unsqueeze(-1)
        noise = gumbel_noise(tables.seed[rows], positions, start, size)
        scaled = logits / torch.where(temperature > 0, temperature, 1.0) + noise
        logits = torch.where(temperature > 0, scaled, logits)
    score, column = argmax_lowest(logits)
    return runner.reduce.best(score, column + start)[1]
