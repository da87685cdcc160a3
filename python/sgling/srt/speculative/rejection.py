"""Lossless p/q rejection for a block drafter: keeps what every draft was drawn from until the verdict needs it."""

from __future__ import annotations

import torch

from sgling.srt.core.step import StepInput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.verify import WindowLogits, adjust_inputs
from sgling_kernel.sampling import SamplingFlags
from sgling_kernel.verdict import Verdict, draw_draft, round_seed, verdict_rejection, without_padding


class RejectionSampler:
    """Draws drafts from the drafter's tempered distribution and judges them by p/q.

    ``draft_logits``: fp32 [B, gamma, V_local], written by draft, read by verify; rows behind the batch are unused.
    """

    def __init__(self, runner: ModelRunner, drafts: int):
        self.runner = runner
        self.draft_logits = torch.zeros(
            runner.plan.max_running_requests, drafts, runner.model.vocab_range[1], device=runner.device
        )

    def pick(self, step: StepInput, starts: torch.Tensor, logits: torch.Tensor, k: int) -> torch.Tensor:
        """Draft k + 1 of every request, int64 [bs], from ``logits`` [bs, V_local]; ``starts``: its length."""
        runner, rows = self.runner, step.req_pool_indices
        self.draft_logits[: len(rows), k] = logits
        tables, start = runner.sampling.tables, runner.model.vocab_range[0]
        seeds = round_seed(tables.seed[rows], starts, "draft")
        score, column = draw_draft(logits, tables.temperature[rows], seeds, starts + k, start)
        return runner.reduce.best(score, column + start)[1]

    def judge(self, window: WindowLogits, flags: SamplingFlags, limits: torch.Tensor) -> Verdict:
        """The verdict; ``limits`` int64 [bs]: drafts of each request that may be accepted."""
        bs, width = window.candidates.shape
        verdict = verdict_rejection(
            window.logits,
            self.draft_logits[:bs, : width - 1],
            window.positions.view(bs, width)[:, 0],
            limits,
            adjust_inputs(self.runner, window),
            flags,
            self.runner.reduce,
        )
        return without_padding(verdict, window.rows)
