"""Chain speculation with the NEXTN layer: draft, verify, extend.

The three steps are separately callable and talk through :class:`RoundBuffers` and the FutureMap only, so that each can
become a graph. Verify never writes KDA states: it stages, and the commit folds the accepted prefix in.
"""

from __future__ import annotations

import torch

from sgling.srt.core.buffers import RoundBuffers
from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode
from sgling.srt.core.step import PrefillInput, StepInput, StepOutput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PlainWorker, PrefillForward
from sgling.srt.speculative.verify import WindowLogits, choose_tokens, window_result
from sgling_kernel.cache_locs import window_locs
from sgling_kernel.kda import StagedBuffers, commit_replay, commit_staged
from sgling_kernel.logits import argmax_lowest
from sgling_kernel.noise import gumbel_noise
from sgling_kernel.sampling import SamplingFlags


class NextnWorker(PlainWorker):
    """One round = draft (k - 1 forwards of the NEXTN layer), verify (W target rows), extend (W NEXTN rows).

    Positions: the NEXTN row at position p reads the token at p + 1 and the hidden state of p, and predicts the token at
    p + 2. Its KV shares the slot of p with the target's.
    """

    def __init__(self, runner: ModelRunner):
        super().__init__(runner)
        self.buffers = RoundBuffers.allocate(
            runner.plan.max_running_requests,
            runner.max_width,
            runner.model_config.hidden_size,
            runner.dtype,
            runner.device,
        )

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

    def decode(self, step: StepInput) -> StepOutput:
        """One round."""
        self.draft(step)
        result = self.verify(step)
        self.extend(step)
        return result

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
        """The drafter's guess after each row, int64 [bs]; sampled requests add the noise the target will add.

        The row at position p guesses the token at p + 2, which the target draws from its row at p + 1.
        """
        runner = self.runner
        logits = runner.draft_model.logits(hidden)
        start, size = runner.draft_model.vocab_range
        if flags.sampled:
            tables = runner.sampling.tables
            temperature = tables.temperature[rows].unsqueeze(-1)
            noise = gumbel_noise(tables.seed[rows], positions + 1, start, size)
            scaled = logits / torch.where(temperature > 0, temperature, 1.0) + noise
            logits = torch.where(temperature > 0, scaled, logits)
        score, column = argmax_lowest(logits)
        return runner.reduce.best(score, column + start)[1]

    def verify(self, step: StepInput) -> StepOutput:
        """Target over the window, verdict, publish, commit of KDA states."""
        runner, rows, width = self.runner, step.req_pool_indices, step.width
        relay = runner.future.gather(rows)
        buffers = self.buffers.views(len(rows), width)
        candidates = torch.cat((relay.bonus.unsqueeze(-1), buffers.draft_tokens), dim=-1)
        locs, positions = window_locs(runner.pools.req_to_token, rows, relay.seq_lens, width)
        batch = ForwardBatch(
            mode=ForwardMode.TARGET_VERIFY,
            input_ids=candidates.flatten(),
            positions=positions,
            out_cache_loc=locs,
            req_pool_indices=rows,
            seq_lens=relay.seq_lens,
            state_slots=relay.state_slots,
            width=width,
            prefix_len=0,
            kv_bound=step.kv_bound,
        )
        hidden = runner.model.forward(batch, runner.pools).hidden
        window = WindowLogits(runner.model.logits(hidden), candidates, positions, rows)
        verdict = choose_tokens(runner, window, step.flags)
        runner.future.publish(rows, relay.seq_lens + verdict.accept_lens, verdict.bonus)
        self.commit(relay.state_slots, relay.seq_lens, verdict.accept_lens, width)
        for buffer, value in zip(
            (buffers.seq_lens, buffers.target_ids, buffers.accept_lens, buffers.hidden),
            (relay.seq_lens, verdict.target_ids, verdict.accept_lens, hidden),
            strict=True,
        ):
            buffer.copy_(value)
        return window_result(runner, window, verdict, step)

    def commit(self, state_slots: torch.Tensor, seq_lens: torch.Tensor, accept_lens: torch.Tensor, width: int) -> None:
        """Make the working state that of the accepted prefix; 0 accepted rows change nothing."""
        pools = self.runner.pools
        conv, temporal, store = pools.state.conv, pools.state.temporal, pools.rollback
        if isinstance(store, StagedBuffers):
            commit_staged(conv, temporal, store, state_slots, accept_lens)
        else:
            commit_replay(conv, temporal, store, state_slots, seq_lens, accept_lens, width)

    def extend(self, step: StepInput) -> None:
        """NEXTN layer over the window with true hidden states; the last accepted row gives the next seed.

        Rows behind it are junk: their KV lies in the next window and is rewritten there.
        """
        runner, rows, width = self.runner, step.req_pool_indices, step.width
        buffers = self.buffers.views(len(rows), width)
        locs, positions = window_locs(runner.pools.req_to_token, rows, buffers.seq_lens, width)
        batch = ForwardBatch(
            mode=ForwardMode.DRAFT_EXTEND,
            input_ids=buffers.target_ids.reshape(-1),
            positions=positions,
            out_cache_loc=locs,
            req_pool_indices=rows,
            seq_lens=buffers.seq_lens,
            state_slots=rows,
            width=width,
            prefix_len=0,
            kv_bound=step.kv_bound,
        )
        hidden = runner.draft_model.forward(batch, buffers.hidden, runner.pools)
        last = (buffers.accept_lens - 1).clamp_min(0)
        select = torch.arange(len(rows), device=rows.device) * width + last
        chosen = hidden.index_select(0, select)
        seed = self.draft_tokens(chosen, positions.index_select(0, select), rows, step.flags)
        runner.future.stash(rows, seed, chosen)
