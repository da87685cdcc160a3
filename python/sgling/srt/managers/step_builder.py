"""Builds the inputs of a device step from host facts and enqueues it."""

from __future__ import annotations

import torch

from sgling.srt.core.step import LogprobRequest, PrefillInput, StepInput
from sgling.srt.managers.launched import Launched
from sgling.srt.managers.prefill import PrefillChunk
from sgling.srt.managers.request import Req
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.observability.step_clock import StepClock
from sgling.srt.speculative.base import StepWorker
from sgling.srt.speculative.dspark_budget import VerifyBudget

KV_BOUND_GRID = 256  # bounds are rounded up, so that their number stays small (the split size of decode attention)


class StepBuilder:
    """Launches prefill chunks and decode steps of one rank."""

    def __init__(self, runner: ModelRunner, worker: StepWorker, clock: StepClock, budget: VerifyBudget | None = None):
        self._runner = runner
        self._worker = worker
        self._clock = clock
        self._budget = budget
        self._rows: list[int] = []
        self._rows_tensor = torch.empty(0, dtype=torch.int64)

    def prefill(self, chunk: PrefillChunk) -> Launched:
        """Enqueue one chunk of a prompt."""
        req, start, end = chunk.req, chunk.start, chunk.end
        logprobs = _union_of_logprobs([req])
        step = PrefillInput(
            req_pool_idx=req.req_pool_idx,
            state_slot=req.state_slot,
            token_ids=req.input_ids[start:end],
            prefix_len=start,
            next_token=None if chunk.last else req.input_ids[end],
            flags=self._runner.sampling.flags_for([req.req_pool_idx]),
            logprobs=logprobs,
            prompt_logprob_start=_prompt_logprob_start(chunk),
        )
        self._runner.begin_step(len(step.token_ids))
        with self._clock.step():
            output = self._worker.prefill(step)
        return Launched([req], self._runner.copy_result(output), 1, chunk, logprobs)

    def decode(self, batch: list[Req], width: int) -> Launched:
        """Enqueue one decode step of running requests, ``width`` rows each."""
        rows = [req.req_pool_idx for req in batch]
        logprobs = _union_of_logprobs(batch)
        longest = max(req.kv_committed_len for req in batch) + 2 * self._runner.window
        step = StepInput(
            req_pool_indices=self._device_rows(rows),
            width=width,
            kv_bound=min(-(-longest // KV_BOUND_GRID) * KV_BOUND_GRID, self._runner.req_to_token.width),
            flags=self._runner.sampling.flags_for(rows),
            logprobs=logprobs,
            verify_rows=self._verify_rows(batch, width),
            seq_lens_cpu=self._host_lengths(batch),
        )
        self._runner.begin_step(step.verify_rows or len(rows) * width)
        with self._clock.step():
            output = self._worker.decode(step)
        return Launched(batch, self._runner.copy_result(output), width, None, logprobs)

    def _verify_rows(self, batch: list[Req], width: int) -> int | None:
        """Row budget of a scheduled step; None when steps are not scheduled."""
        if self._budget is None:
            return None
        histories = [req.depth.confidences for req in batch]
        rows = self._budget.rows_for(histories, width)
        for history in histories:
            history.begin()
        return rows

    def _host_lengths(self, batch: list[Req]) -> tuple[int, ...] | None:
        """Exact lengths where a backend needs them: no step is in flight then, so the host's are up to date."""
        if not self._runner.needs_cpu_seq_lens:
            return None
        return tuple(req.kv_committed_len for req in batch)

    def _device_rows(self, rows: list[int]) -> torch.Tensor:
        """int64 [bs] on the device; an unchanged batch sends nothing."""
        if rows != self._rows:
            self._rows = rows
            self._rows_tensor = self._runner.to_device(rows)
        return self._rows_tensor


def _union_of_logprobs(reqs: list[Req]) -> LogprobRequest | None:
    """What the step must return so that every request finds its logprobs; None when nobody asks."""
    asking = [req.recv for req in reqs if req.recv.return_logprob]
    if not asking:
        return None
    ids = sorted({token_id for recv in asking for token_id in recv.token_ids_logprob})
    return LogprobRequest(max(recv.top_logprobs_num for recv in asking), tuple(ids))


def _prompt_logprob_start(chunk: PrefillChunk) -> int | None:
    """Row of the chunk whose prediction is the first wanted prompt token, or None when the chunk holds none.

    Row i predicts prompt token ``start + i + 1``; token 0 is predicted by nothing.
    """
    req = chunk.req
    if not req.wants_prompt_logprobs:
        return None
    first_row = max(chunk.start, req.recv.logprob_start_len - 1, 0)
    last_row = min(chunk.end, req.prompt_len - 1)
    return first_row - chunk.start if first_row < last_row else None
