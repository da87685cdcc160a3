"""Prompts at start, so that no client's first prompt waits for compilers: every kind of length once.

They run on a free request row with an empty context; it owns no slots, so all they write goes to the dummies.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import torch

from sgling.srt.core.step import PrefillInput, StepOutput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling_kernel.sampling import SamplingFlags

logger = logging.getLogger(__name__)

LENGTHS = (5, 100, 209, 1024)  # decode kernels' row tiles; products of the library; odd and divisible lengths
_ROW = 1


class PrefillWorker(Protocol):
    """What reads prompts."""

    def prefill(self, step: PrefillInput) -> StepOutput:
        """One chunk of one prompt."""


def warm_up_prefill(runner: ModelRunner, worker: PrefillWorker, chunk: int) -> float:
    """Seconds that the first prompts of this process took; 0 on a CPU, where nothing is compiled.

    ``chunk``: tokens per prefill chunk, -1 = whole prompts. Call before the first request is admitted.
    """
    if runner.device != "cuda":
        return 0.0
    begin = time.perf_counter()
    read_prompts(runner, worker, chunk)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    logger.info("prefill warmed up in %.1f s", seconds)
    return seconds


@torch.inference_mode()
def read_prompts(runner: ModelRunner, worker: PrefillWorker, chunk: int) -> None:
    """Prompts of ``LENGTHS``, none longer than a chunk or the context; leaves row and dummy state as they were."""
    longest = min(runner.plan.context_len - 1, chunk if chunk > 0 else runner.plan.context_len)
    future = runner.future
    with runner.on_forward_stream():
        for length in sorted({min(length, longest) for length in LENGTHS}):
            worker.prefill(PrefillInput(_ROW, 0, [0] * length, 0, None, SamplingFlags(), None, None))
        for buffer in (future.new_seq_lens, future.output_tokens, future.topk_index, future.hidden_states):
            buffer[_ROW].zero_()
        runner.pools.state.clear(0)
