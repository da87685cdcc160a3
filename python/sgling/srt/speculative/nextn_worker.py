"""Chain speculation with the NEXTN layer: chained one-token drafts, and an extend with true hidden states."""

from __future__ import annotations

import torch

from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode, ModelOutput
from sgling.srt.core.step import PrefillInput, StepInput, StepOutput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PrefillForward, window_batch
from sgling.srt.speculative.chain_worker import ChainWorker
from sgling.srt.speculative.guess import guess_tokens
from sgling_kernel.cache_locs import window_locs
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
        seed = self.draft_tokens(last, done.batch.positions[-1:], rows, flags)
        self.runner.future.stash(rows, seed, last)

    def features(self, output: ModelOutput) -> torch.Tensor:
        """The final hidden states of verify's rows."""
        return output.hidden

    def draft(self, step: StepInput) -> None:
        """Fill ``draft_tokens``: candidate 1 is the seed of the previous extend, the rest are chained forwards."""
        if step.width == 1:
            return
        runner, rows = self.runner, step.req_pool_indices
        relay = runner.future.gather(rows)
        count = step.width - 1
        locs, positions = window_locs(runner.pools.req_to_token, rows, relay.seq_lens, count)
        locs, positions = locs.view(-1, count), positions.view(-1, count)
        token, hidden = relay.seed, relay.hidden
        out = self.buffers.views(len(rows), step.width).draft_tokens
        out[:, 0] = token
        for i in range(count - 1):
            batch = ForwardBatch(
                mode=ForwardMode.DRAFT_DECODE,
                input_ids=token,
                positions=positions[:, i],
                out_cache_loc=locs[:, i],
                req_pool_indices=rows,
                seq_lens=relay.seq_lens + i,
                state_slots=relay.state_slots,
                width=1,
                prefix_len=0,
                kv_bound=step.kv_bound,
            )
            hidden = runner.draft_model.forward(batch, hidden, runner.pools)
            token = self.draft_tokens(hidden, positions[:, i], rows, step.flags)
            out[:, i + 1] = token

    def draft_tokens(
        self, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, flags: SamplingFlags
    ) -> torch.Tensor:
        """The drafter's guess after each row, int64 [bs].

        The row at position p guesses the token at p + 2, which the target draws from its row at p + 1.
        """
        return guess_tokens(self.runner, self.runner.draft_model.logits(hidden), positions + 1, rows, flags)

    def extend(self, step: StepInput) -> None:
        """NEXTN layer over the window with true hidden states; the last accepted row gives the next seed.

        Rows behind it are junk: their KV lies in the next window and is rewritten there.
        """
        runner, rows, width = self.runner, step.req_pool_indices, step.width
        buffers = self.buffers.views(len(rows), width)
        slots = rows  # never read: the NEXTN layer has no KDA state
        batch = window_batch(runner, ForwardMode.DRAFT_EXTEND, step, buffers.target_ids, buffers.seq_lens, slots)
        hidden = runner.draft_model.forward(batch, buffers.features, runner.pools)
        last = (buffers.accept_lens - 1).clamp_min(0)
        select = torch.arange(len(rows), device=rows.device) * width + last
        chosen = hidden.index_select(0, select)
        seed = self.draft_tokens(chosen, batch.positions.index_select(0, select), rows, step.flags)
        runner.future.stash(rows, seed, chosen)
