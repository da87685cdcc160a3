"""Device side of confidence scheduling: estimates survival after drafting and splits the step's row budget."""

from __future__ import annotations

import torch

from sgling.srt.core.step import StepInput, VerifySchedule
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.models.dspark import DSparkDrafter
from sgling_kernel.confidence import allocate_rows, survival


class ConfidenceScheduler:
    """Buffers and arithmetic of one worker.

    ``schedule``: confidence fp32 [B, gamma] and verify_lens int64 [B]; written by draft, read by verify.
    ``temperatures``: fp32 [gamma] of sequential scaling, never written after start.
    """

    def __init__(self, runner: ModelRunner, drafter: DSparkDrafter, temperatures: tuple[float, ...]):
        batch, drafts, device = runner.plan.max_running_requests, runner.max_width - 1, runner.device
        self.drafter = drafter
        self.temperatures = torch.tensor(temperatures, device=device)
        self.schedule = VerifySchedule(
            confidence=torch.zeros(batch, drafts, device=device),
            verify_lens=torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def assess(self, step: StepInput, hidden: torch.Tensor, anchor: torch.Tensor, drafts: torch.Tensor) -> None:
        """Fill the schedule of a step.

        Args:
            hidden: [bs, gamma, d] of the rows that predicted the drafts.
            anchor: int64 [bs]; drafts: int64 [bs, gamma].
        """
        rows, markov = step.req_pool_indices, self.drafter.markov
        previous = torch.cat((anchor.unsqueeze(-1), drafts[:, :-1]), dim=-1)
        embedded = markov.embed(previous) if markov else None
        raw = self.drafter.confidence.forward(hidden, embedded)
        lens = allocate_rows(survival(raw, self.temperatures), rows > 0, step.verify_rows, step.width)
        mine = self.view(len(rows))
        mine.confidence.copy_(raw)
        mine.verify_lens.copy_(lens)

    def view(self, batch: int) -> VerifySchedule:
        """The schedule of the first ``batch`` requests (views)."""
        return VerifySchedule(*(buffer[:batch] for buffer in self.schedule))
