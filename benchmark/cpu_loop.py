"""Drives schedulers in this thread, one request at a time, with the time of every increment: the tool of cpu_shape.py.

Time is ``time.thread_time``, the processor time of the one thread that does everything here: what a clock on the wall
shows on an idle machine, without the waits of a busy one.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.managers.io_struct import RequestOutput, ShutdownReq, TokenizedGenerateReqInput
from sgling.srt.managers.overlap import event_loop_normal, event_loop_overlap
from sgling.srt.managers.scheduler import Scheduler
from sgling.srt.sampling.sampling_params import SamplingParams

LOOPS = {"normal": event_loop_normal, "overlap": event_loop_overlap}


class Run(NamedTuple):
    """One request.

    Attributes:
        ids: its output.
        times: seconds of ``thread_time`` at each increment.
        counts: output tokens known at each increment.
        accept_length: tokens per verify step, bonus included; None without speculation.
    """

    ids: list[int]
    times: list[float]
    counts: list[int]
    accept_length: float | None

    def tpot(self) -> float:
        """Seconds per token after the first increment."""
        return (self.times[-1] - self.times[0]) / (self.counts[-1] - self.counts[0])


class OneRequest:
    """A scheduler channel that delivers one request and orders a shutdown when its answer is complete."""

    def __init__(self) -> None:
        self._inbox: list = []
        self._outputs: list[tuple[float, RequestOutput]] = []

    def put(self, request: TokenizedGenerateReqInput) -> None:
        """Queue the request of the next loop."""
        self._inbox, self._outputs = [request], []

    def recv(self) -> list:
        """What the scheduler takes: the request once, later the shutdown."""
        messages, self._inbox = self._inbox, []
        return messages

    def wait(self, timeout_s: float) -> bool:
        """The loop never sleeps here."""
        return bool(self._inbox)

    def send(self, message) -> None:
        """Keep an increment with its time."""
        for output in getattr(message, "outputs", ()):
            self._outputs.append((time.thread_time(), output))
            if output.finished_reason is not None:
                self._inbox = [ShutdownReq()]

    def run(self) -> Run:
        """What the answer was."""
        outputs = [output for _, output in self._outputs]
        spec = outputs[-1].spec
        steps = spec.verify_ct if spec else 0
        return Run(
            ids=[token for output in outputs for token in output.new_ids],
            times=[moment for moment, _ in self._outputs],
            counts=[output.completion_tokens for output in outputs],
            accept_length=(spec.correct_drafts + steps) / steps if steps else None,
        )


class Driver:
    """One scheduler over a model directory; keyword arguments are server arguments."""

    def __init__(self, model_path: str, **kwargs):
        args = ServerArgs.from_kwargs(
            model_path=model_path, device="cpu", max_running_requests=2, random_seed=0, stream_interval=1, **kwargs
        )
        config = ModelConfig.from_dir(model_path, args.json_model_override_args)
        self.channel = OneRequest()
        self.scheduler = Scheduler(args, config, self.channel, ParallelState.single())

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, loop: str = "overlap", ignore_eos: bool = False) -> Run:
        """Greedy answer to a prompt under one of the two event loops."""
        params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, sampling_seed=0)
        self.channel.put(TokenizedGenerateReqInput("r", prompt, params, stream=True))
        self.scheduler.core.stopped = False
        LOOPS[loop](self.scheduler)
        return self.channel.run()

    @torch.inference_mode()
    def bare(self, length: int, count: int) -> list[float]:
        """Seconds of ``count`` bare decode steps (forward, logits, arg-max) of a row at ``length`` tokens.

        The row is borrowed from the scheduler's own pools and given back; what its cache holds does not matter.
        """
        core = self.scheduler.core
        runner, resources = core.runner, core.resources
        row, slot = resources.rows.alloc(), resources.state_slots.alloc()
        kv_slots = resources.kv.alloc_pages(length + count)
        runner.req_to_token.write(row, 0, kv_slots)
        rows, slots = torch.tensor([row]), torch.tensor([slot])
        runner.begin_step(1)
        token, times = torch.zeros(1, dtype=torch.int64), [time.thread_time()]
        for position in range(length, length + count):
            token = self._bare_step(token, position, rows, slots)
            times.append(time.thread_time())
        resources.rows.free(row)
        resources.state_slots.free(slot)
        resources.kv.free_slots(kv_slots)
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    def _bare_step(self, token: torch.Tensor, position: int, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        runner = self.scheduler.core.runner
        where = torch.tensor([position])
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=token,
            positions=where,
            out_cache_loc=runner.pools.req_to_token[rows, where],
            req_pool_indices=rows,
            seq_lens=where,
            state_slots=slots,
            width=1,
            prefix_len=0,
            kv_bound=-(-(position + 2) // 256) * 256,
        )
        return runner.model.logits(runner.model.forward(batch, runner.pools).hidden).argmax(-1)
