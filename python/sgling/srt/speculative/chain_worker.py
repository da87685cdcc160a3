"""What every chain speculator shares: the buffers of a round, verify, and the commit of KDA states.

A round is draft, verify, extend. The three are separately callable and talk through :class:`RoundBuffers` and the
FutureMap only, so that each can become a graph. Verify never writes KDA states: it stages, and the commit folds the
accepted prefix in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from sgling.srt.core.buffers import RoundBuffers
from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode, ModelOutput
from sgling.srt.core.step import StepInput, StepOutput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PlainWorker, window_batch
from sgling.srt.speculative.simulate import checked_mean
from sgling.srt.speculative.verify import WindowLogits, choose_tokens, window_result
from sgling_kernel.kda import StagedBuffers, commit_replay, commit_staged
from sgling_kernel.verdict import Verdict, settle


class ChainWorker(PlainWorker, ABC):
    """One candidate chain per request; subclasses draft it and digest what verify found."""

    target_mode = ForwardMode.TARGET_VERIFY

    def __init__(self, runner: ModelRunner, feature_size: int):
        """``feature_size``: width of what the drafter reads of a verify's rows."""
        super().__init__(runner)
        self.buffers = RoundBuffers.allocate(
            runner.plan.max_running_requests, runner.max_width, feature_size, runner.dtype, runner.device
        )

    def device_steps(self) -> tuple[tuple[str, Callable[[StepInput], StepOutput | None]], ...]:
        """See :class:`PlainWorker`."""
        return (("draft", self.draft), ("verify", self.verify), ("extend", self.extend))

    def decode(self, step: StepInput) -> StepOutput:
        """One round."""
        self.metadata.before_step(step)
        self.draft(step)
        result = self.verify(step)
        self.extend(step)
        return result

    @abstractmethod
    def draft(self, step: StepInput) -> None:
        """Fill ``buffers.draft_tokens``."""

    @abstractmethod
    def extend(self, step: StepInput) -> None:
        """Bring the drafter up to the committed length, from ``buffers.features`` of verify's rows."""

    @abstractmethod
    def features(self, output: ModelOutput) -> torch.Tensor:
        """What the drafter reads of verify's rows, [bs * W, feature_size]."""

    def run_target(self, batch: ForwardBatch, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Target over the rows of a verify: (logits fp32 [bs * W, V_local], features [bs * W, feature_size])."""
        output = self.runner.model.forward(batch, self.runner.pools)
        return self.runner.model.logits(output.hidden), self.features(output)

    def judge(self, window: WindowLogits, step: StepInput) -> Verdict:
        """The verdict over a window."""
        return choose_tokens(self.runner, window, step.flags)

    def verify(self, step: StepInput) -> StepOutput:
        """Target over the window, verdict, publish, commit of KDA states."""
        runner, rows, width = self.runner, step.req_pool_indices, step.width
        metadata = self.metadata.at_start(step)
        buffers = self.buffers.views(len(rows), width)
        candidates = runner.future.candidates(rows, buffers.draft_tokens)
        batch = window_batch(ForwardMode.TARGET_VERIFY, step, candidates, metadata)
        logits, features = self.run_target(batch, step)
        window = WindowLogits(logits, candidates, batch.positions, rows)
        verdict = self.judge(window, step)
        sinks = runner.future.sinks(
            target_ids=buffers.target_ids,
            accept_lens=buffers.accept_lens,
            features=(features, buffers.features),
            packed=step.packed,
        )
        verdict = settle(verdict, rows, metadata.seq_lens, sinks, checked_mean(runner.simulated_accept))
        self.commit(metadata.state_slots, metadata.seq_lens, verdict.accept_lens, width)
        return window_result(runner, window, verdict, step)

    def commit(self, state_slots: torch.Tensor, seq_lens: torch.Tensor, accept_lens: torch.Tensor, width: int) -> None:
        """Make the working state that of the accepted prefix; 0 accepted rows change nothing."""
        pools = self.runner.pools
        conv, temporal, store = pools.state.conv, pools.state.temporal, pools.rollback
        if isinstance(store, StagedBuffers):
            commit_staged(conv, temporal, store, state_slots, accept_lens)
        else:
            commit_replay(conv, temporal, store, state_slots, seq_lens, accept_lens, width)
