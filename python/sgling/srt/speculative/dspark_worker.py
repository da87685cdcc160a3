"""Chain speculation with a DSpark block drafter: a whole block per step, then a short sequential correction.

Terms of docs/dspark.md §0: the anchor is the newest committed token, its position is the committed length P; draft k
sits at P + k. The drafter's cache holds positions below P, made of target features only.
"""

from __future__ import annotations

import torch

from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode, ModelOutput
from sgling.srt.core.ragged import RaggedVerifyLayout
from sgling.srt.core.step import PrefillInput, StepInput, StepOutput, VerifySchedule
from sgling.srt.core.step_metadata import StepMetadata
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.models.dspark import DSparkDrafter
from sgling.srt.speculative.base import window_batch
from sgling.srt.speculative.chain_worker import ChainWorker
from sgling.srt.speculative.dspark_confidence import ConfidenceScheduler
from sgling.srt.speculative.guess import guess_tokens
from sgling.srt.speculative.rejection import RejectionSampler
from sgling.srt.speculative.verify import WindowLogits
from sgling_kernel.cache_locs import keep_accepted
from sgling_kernel.markov import DraftNoise, markov_chain
from sgling_kernel.verdict import Verdict


class DSparkWorker(ChainWorker):
    """One round = draft (block forward, Markov chain), verify (W target rows), extend (inject accepted features)."""

    def __init__(self, runner: ModelRunner):
        self.drafter: DSparkDrafter = runner.draft_model
        self.config = self.drafter.config
        super().__init__(runner, len(self.config.target_layer_ids) * self.config.hidden_size)
        options = self.options = runner.spec.dspark
        if options.scheduled and runner.simulated_accept is not None:
            raise ValueError("SGLANG_SIMULATE_ACC_LEN: only where every draft is verified (static verify, fixed depth)")
        self.scheduler = ConfidenceScheduler(runner, self.drafter, options.temperatures) if options.scheduled else None
        self.rejection = RejectionSampler(runner, options.drafts) if options.rejection_sampling else None
        shape = (runner.plan.max_running_requests, self.config.block_rows)
        self._block_ids = torch.full(shape, self.config.mask_token_id, dtype=torch.int64, device=runner.device)

    def prefill(self, step: PrefillInput) -> StepOutput:
        """Target chunk, then the features of all its rows into the drafter's cache, at the prompt's own slots."""
        done = self.prefill_target(step)
        self.drafter.inject(done.output.taps, done.batch.positions, done.batch.out_cache_loc, self.runner.pools)
        return done.result

    def features(self, output: ModelOutput) -> torch.Tensor:
        """The tapped layers of verify's rows."""
        return output.taps

    def draft(self, step: StepInput) -> None:
        """Fill ``draft_tokens``: one forward over the whole block, then one Markov step per draft.

        The block always has the rows it was trained with; a narrower step uses its first drafts. A scheduled step
        drafts all of them, to know how far it pays to verify next time.
        """
        count = step.width - 1 if step.verify_rows is None else self.runner.max_width - 1
        if count == 0:
            return
        rows = step.req_pool_indices
        metadata, anchor = self.metadata.at_start(step), self.runner.future.bonus(rows)
        hidden = self.block_hidden(step, metadata, anchor)[:, :count]
        base = self.drafter.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        drafts = self.buffers.views(len(rows), count + 1).draft_tokens
        self.chain(step, (metadata.seq_lens, anchor), hidden, base, drafts)
        if step.verify_rows is not None:
            self.scheduler.assess(step, hidden, anchor, drafts)

    def columns(self, step: StepInput) -> int:
        """A block may be longer than what is verified of it."""
        return max(step.width, self.config.block_rows)

    def block_hidden(self, step: StepInput, metadata: StepMetadata, anchor: torch.Tensor) -> torch.Tensor:
        """Backbone output of the rows that predict drafts, [bs, block_size, d].

        Block rows write their own cache entries behind the committed ones, where the next injection overwrites them.
        """
        rows, count = step.req_pool_indices, self.config.block_rows
        ids = self._block_ids[: len(rows)]  # only the anchors ever change
        ids[:, 0] = anchor
        batch = window_batch(ForwardMode.DRAFT_BLOCK, step, ids, metadata)
        hidden = self.drafter.forward(batch, self.runner.pools)
        return hidden.view(len(rows), count, -1)[:, count - self.config.block_size :]

    def chain(
        self,
        step: StepInput,
        anchors: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
        base: torch.Tensor,
        drafts: torch.Tensor,
    ) -> None:
        """Draw the drafts one after the other; each corrects the logits of the next.

        Args:
            anchors: (positions, tokens) int64 [bs] of the newest committed tokens.
            hidden: [bs, k, d]; base: fp32 [bs, k, V_local], its logits.
            drafts: int64 [bs, k], filled.
        """
        markov, (starts, previous) = self.drafter.markov, anchors
        rejection = self.rejection is not None and step.flags.sampled
        if markov and markov.vanilla and not rejection and self.runner.parallel.size == 1:
            tables = self.runner.sampling.tables
            noise = DraftNoise(tables.temperature, tables.seed, step.req_pool_indices, starts)
            markov_chain(base, markov.w1, markov.w2, previous, noise if step.flags.sampled else None, drafts)
            return
        state = markov.start(len(previous)) if markov else None
        for k in range(drafts.shape[1]):
            logits = base[:, k]
            if markov:
                bias, state = markov.step(previous, hidden[:, k], state)
                logits = logits + bias
            previous = self.pick(step, starts, logits, k)
            drafts[:, k] = previous

    def pick(self, step: StepInput, starts: torch.Tensor, logits: torch.Tensor, k: int) -> torch.Tensor:
        """Draft k + 1 of every request from its logits fp32 [bs, V_local]; int64 [bs].

        The target draws the token at position P + k + 1 from its row at P + k.
        """
        if self.rejection and step.flags.sampled:
            return self.rejection.pick(step, starts, logits, k)
        return guess_tokens(self.runner, logits, starts + k, step.req_pool_indices, step.flags)

    def run_target(self, batch: ForwardBatch, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Target over the window; rows that the schedule cut are left out of all row-wise layers (compact mode)."""
        full = len(step.req_pool_indices) * step.width
        if step.verify_rows is None or step.verify_rows >= full or self.options.verify_mode == "cap-accept":
            return super().run_target(batch, step)
        lens = self.scheduler.view(len(step.req_pool_indices)).verify_lens
        layout = RaggedVerifyLayout.build(lens, step.width, step.verify_rows)
        packed = {name: layout.pack(getattr(batch, name)) for name in ("input_ids", "positions", "out_cache_loc")}
        logits, features = super().run_target(batch._replace(**packed, ragged=layout), step)
        return layout.spread(logits), layout.spread(features)

    def judge(self, window: WindowLogits, step: StepInput) -> Verdict:
        """Sampled verify, or p/q rejection when it is asked for and somebody samples; drafts that were cut fail."""
        rejection, width, limits = self.rejection is not None and step.flags.sampled, step.width, None
        if step.verify_rows is not None:
            lens = self.scheduler.view(len(window.rows)).verify_lens
            limits = (lens - 1).clamp_min(0)
            cut = torch.arange(width, device=lens.device) > limits.unsqueeze(-1)
            window = window._replace(candidates=window.candidates.masked_fill(cut, -1))
        if rejection:
            limits = torch.full_like(window.rows, width - 1) if limits is None else limits
            return self.rejection.judge(window, step.flags, limits)
        return super().judge(window, step)

    def verify(self, step: StepInput) -> StepOutput:
        """See :class:`ChainWorker`; a scheduled step also returns a copy of its schedule.

        The next draft rewrites the buffers while the result may still be on its way to the host.
        """
        result = super().verify(step)
        if step.verify_rows is None:
            return result
        schedule = self.scheduler.view(len(step.req_pool_indices))
        return result._replace(schedule=VerifySchedule(*(buffer.clone() for buffer in schedule)))

    def extend(self, step: StepInput) -> None:
        """Inject the features of accepted rows: exactly one cache entry per committed token."""
        rows, width = step.req_pool_indices, step.width
        buffers = self.buffers.views(len(rows), width)
        locs, positions = self.metadata.of_step(step).window(width)
        kept = keep_accepted(locs, buffers.accept_lens)
        self.drafter.inject(buffers.features, positions, kept, self.runner.pools)
