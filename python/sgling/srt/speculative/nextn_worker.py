"""Chain speculation with the NEXTN layer: chained one-token drafts, and an extend with true hidden states."""

from __future__ import annotations

import torch

from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode, ModelOutput
from sgling.srt.core.step import PrefillInput, StepInput, StepOutput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PrefillForward, window_batch
from sgling.srt.speculative.chain_worker import ChainWorker
from sgling.srt.speculative.guess import guess_into
from sgling_kernel.sampling import SamplingFlags


class NextnWorker(ChainWorker):
    """One round = draft (k - 1 forwards of the NEXTN layer), verify (W target rows), extend (W NEXTN rows).

    Positions: the NEXTN row at position p reads the token at p + 1 and the hidden state of p, and predicts the token at
    p + 2. Its KV shares the slot of p with the target's.
    """

    def __init__(self, runner: ModelRunner):
        super().__init__(runner, runner.model_config.hidden_size)

    def prefill(self, step: PrefillInput) -> StepOutput:
        """Target chunk, then the NEXTN layer over the same chunk with the ids shifted by one.

        The last id is the next prompt token, or the first output token at the end of the prompt; there the last row
        also gives the seed of the first draft.
        """
        done = self.prefill_target(step)
        tail = done.first_token if step.next_token is None else self.runner.to_device([step.next_token])
        batch = done.batch._replace(
            mode=ForwardMode.DRAFT_PREFILL, input_ids=torch.cat((done.batch.input_ids[1:], tail))
        )
        hidden = self.runner.draft_model.forward(batch, done.output.hidden, self.runner.pools)
        if done.first_token is not None:
            self._stash(done, hidden, step.flags)
        return done.result

    def _stash(self, done: PrefillForward, hidden: torch.Tensor, flags: SamplingFlags) -> None:
        rows, last = done.batch.req_pool_indices, hidden[-1:]
        seed = torch.empty_like(rows)
        self.guess(last, done.batch.positions[-1:] + 1, rows, flags, seed)
        self.runner.future.stash(rows, seed, last)

    def features(self, output: ModelOutput) -> torch.Tensor:
        """The final hidden states of verify's rows."""
        return output.hidden

    def draft(self, step: StepInput) -> None:
        """Fill ``draft_tokens``: candidate 1 is the seed of the previous extend, the rest are chained forwards."""
        if step.width == 1:
            return
        runner, rows = self.runner, step.req_pool_indices
        metadata = self.metadata.at_start(step)
        locs, positions = (window.t().contiguous() for window in (metadata.locs, metadata.positions))
        tokens = self.buffers.views(len(rows), step.width).draft_tokens
        hidden = runner.future.draft_seed(rows, tokens[:, 0])
        for i in range(step.width - 2):
            batch = ForwardBatch(
                mode=ForwardMode.DRAFT_DECODE,
                input_ids=tokens[:, i],
                positions=positions[i],
                out_cache_loc=locs[i],
                req_pool_indices=rows,
                seq_lens=positions[i],
                state_slots=metadata.state_slots,
                width=1,
                prefix_len=0,
                kv_bound=step.kv_bound,
            )
            hidden = runner.draft_model.forward(batch, hidden, runner.pools)
            self.guess(hidden, positions[i + 1], rows, step.flags, tokens[:, i + 1])

    def guess(
        self, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, flags: SamplingFlags, out: torch.Tensor
    ) -> None:
        """The drafter's guess after each row, into ``out`` int64 [bs].

        The row at position p guesses the token at p + 2, which the target draws from its row at ``positions`` = p + 1.
        """
        guess_into(self.runner, hidden, positions, rows, flags, out)

    def extend(self, step: StepInput) -> None:
        """KV of the window from true hidden states; the last accepted row goes on to give the next seed.

        Rows behind it are junk: their KV lies in the next window and is rewritten there.
        """
        runner, rows = self.runner, step.req_pool_indices
        buffers, metadata = self.buffers.views(len(rows), step.width), self.metadata.of_step(step)
        batch = window_batch(ForwardMode.DRAFT_EXTEND, step, buffers.target_ids, metadata)
        hidden = runner.draft_model.forward(batch, buffers.features, runner.pools, buffers.accept_lens)
        seed = torch.empty_like(rows)
        drawn_at = metadata.seq_lens + buffers.accept_lens if step.flags.sampled else rows  # greedy guesses need none
        self.guess(hidden, drawn_at, rows, step.flags, seed)
        runner.future.stash(rows, seed, hidden)
