"""The step worker interface and plain decoding, the oracle of every speculative worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode, ModelOutput
from sgling.srt.core.step import PrefillInput, StepInput, StepOutput
from sgling.srt.core.step_metadata import StepMetadata
from sgling.srt.model_executor.metadata_registry import create_metadata
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.verify import WindowLogits, choose_tokens, prompt_logprobs, window_result
from sgling_kernel.verdict import settle


class StepWorker(Protocol):
    """Enqueues device steps; nothing here reads a device value."""

    def prefill(self, step: PrefillInput) -> StepOutput:
        """One chunk of one prompt; the last chunk also chooses the first token."""

    def decode(self, step: StepInput) -> StepOutput:
        """One step of running requests; commits at least one token each."""


def window_batch(mode: ForwardMode, step: StepInput, ids: torch.Tensor, metadata: StepMetadata) -> ForwardBatch:
    """Forward batch of ``ids`` int64 [bs, W]: the rows of each request from its committed length on."""
    width = ids.shape[1]
    locs, positions = metadata.window(width)
    return ForwardBatch(
        mode=mode,
        input_ids=ids.reshape(-1),
        positions=positions,
        out_cache_loc=locs,
        req_pool_indices=step.req_pool_indices,
        seq_lens=metadata.seq_lens,
        state_slots=metadata.state_slots,
        width=width,
        prefix_len=0,
        kv_bound=step.kv_bound,
        seq_lens_cpu=step.seq_lens_cpu,
    )


class PrefillForward(NamedTuple):
    """A prefill chunk after the target ran: its batch and output, and the first token (None inside a prompt)."""

    batch: ForwardBatch
    output: ModelOutput
    first_token: torch.Tensor | None
    result: StepOutput


class PlainWorker:
    """Decoding without speculation: one row per request, caches updated in place.

    Attributes:
        metadata: where the rows of a step live; every device step asks it.
    """

    target_mode = ForwardMode.DECODE

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.metadata = create_metadata(runner, self.target_mode, self.columns)

    def columns(self, step: StepInput) -> int:
        """Consecutive rows per request that a step touches."""
        return step.width

    def prefill(self, step: PrefillInput) -> StepOutput:
        """See :class:`StepWorker`."""
        return self.prefill_target(step).result

    def prefill_target(self, step: PrefillInput) -> PrefillForward:
        """Run the target over a chunk; at the end of the prompt, choose the first token and publish it."""
        runner = self.runner
        batch = self.prefill_batch(step)
        output = runner.model.forward(batch, runner.pools)
        prompt = prompt_logprobs(runner, step, batch, output.hidden)
        if step.next_token is not None:
            nothing = torch.zeros(1, 1, dtype=torch.int64, device=runner.device)
            return PrefillForward(batch, output, None, StepOutput(nothing, nothing[0], None, prompt))
        rows, last = batch.req_pool_indices, batch.positions[-1:]
        window = WindowLogits(runner.model.logits(output.hidden[-1:]), batch.input_ids[-1:].view(1, 1), last, rows)
        verdict = choose_tokens(runner, window, step.flags)
        runner.future.publish(rows, last + 1, verdict.bonus)
        result = window_result(runner, window, verdict, step)._replace(prompt_logprobs=prompt)
        return PrefillForward(batch, output, verdict.bonus, result)

    def prefill_batch(self, step: PrefillInput) -> ForwardBatch:
        """Forward batch of a chunk: everything is known to the host."""
        runner, count = self.runner, len(step.token_ids)
        rows = runner.to_device([step.req_pool_idx])
        end = step.prefix_len + count
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=runner.to_device(step.token_ids),
            positions=torch.arange(step.prefix_len, end, device=runner.device),
            out_cache_loc=runner.pools.req_to_token[step.req_pool_idx, step.prefix_len : end],
            req_pool_indices=rows,
            seq_lens=torch.full_like(rows, step.prefix_len),
            state_slots=runner.to_device([step.state_slot]),
            width=count,
            prefix_len=step.prefix_len,
            kv_bound=end,
        )

    def device_steps(self) -> tuple[tuple[str, Callable[[StepInput], StepOutput | None]], ...]:
        """The device steps of :meth:`decode` by name, in order; each can become a graph."""
        return (("decode", self.step),)

    def decode(self, step: StepInput) -> StepOutput:
        """See :class:`StepWorker`."""
        self.metadata.before_step(step)
        return self.step(step)

    def step(self, step: StepInput) -> StepOutput:
        """The only device step of plain decoding."""
        runner, rows = self.runner, step.req_pool_indices
        metadata = self.metadata.at_start(step)
        root = runner.future.bonus(rows).unsqueeze(-1)
        batch = window_batch(ForwardMode.DECODE, step, root, metadata)
        hidden = runner.model.forward(batch, runner.pools).hidden
        window = WindowLogits(runner.model.logits(hidden), root, batch.positions, rows)
        verdict = choose_tokens(runner, window, step.flags)
        settle(verdict, rows, metadata.seq_lens, runner.future.sinks(packed=step.packed))
        return window_result(runner, window, verdict, step)
