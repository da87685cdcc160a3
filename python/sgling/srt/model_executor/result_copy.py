"""The one routine read of device values: a step's result, copied to pinned memory and awaited one step late."""

from __future__ import annotations

import torch

from sgling.srt.core.step import LogprobTensors, StepOutput, VerifySchedule
from sgling.srt.model_executor.device_clock import DeviceClock


class ResultHandle:
    """A step result on its way to the host.

    On a GPU the copies run on ``copy_stream`` behind the step, into pinned memory, and ``copy_done`` is recorded; the
    device tensors are kept alive until :meth:`wait`. A packed result travels as one copy. On the CPU the values are
    cloned, since the step's buffers are rewritten by the next step.
    """

    def __init__(self, output: StepOutput, copy_stream: torch.cuda.Stream | None, clock: DeviceClock | None = None):
        self._device_output = output if copy_stream is not None else None
        self.copy_done: torch.cuda.Event | None = None
        self._clock = clock
        self._mark = clock.end() if clock is not None else None
        if copy_stream is None:
            self._host = _map_tensors(output, torch.Tensor.clone)
            return
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            self._host = _from_packed(output) if output.packed is not None else _map_tensors(output, _to_pinned)
            self.copy_done = torch.cuda.Event()
            self.copy_done.record()

    def wait(self) -> StepOutput:
        """The result in host memory; blocks until the copy of this (previous) step is done."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
            self._device_output = None
        if self._mark is not None:
            self._clock.settle(self._mark)
            self._mark = None
        return self._host


def _from_packed(output: StepOutput) -> StepOutput:
    packed = _to_pinned(output.packed)
    return StepOutput(packed[:, :-1], packed[:, -1], None, None)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


def _map_tensors(output: StepOutput, fn) -> StepOutput:
    def logprobs(values: LogprobTensors | None) -> LogprobTensors | None:
        return None if values is None else LogprobTensors(*(fn(value) for value in values))

    return StepOutput(
        tokens=fn(output.tokens),
        accept_lens=fn(output.accept_lens),
        logprobs=logprobs(output.logprobs),
        prompt_logprobs=logprobs(output.prompt_logprobs),
        schedule=None if output.schedule is None else VerifySchedule(*map(fn, output.schedule)),
    )
