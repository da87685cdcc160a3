"""A worker's decode rounds under graphs, driven as the overlapped scheduler drives them, and their clocks."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from rank_shape import greedy_step, set_length

from sgling.srt.core.step import StepInput
from sgling.srt.layers import moe
from sgling.srt.model_executor.graph_runner import GraphRunner
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PlainWorker
from sgling.srt.speculative.dspark_worker import DSparkWorker
from sgling.srt.speculative.nextn_worker import NextnWorker
from sgling_kernel.sampling import SamplingFlags

LAUNCHES, SPAN_ROUNDS = 40, 30
WORKERS = {"plain": PlainWorker, "NEXTN": NextnWorker, "DSPARK": DSparkWorker}


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        algorithm: "plain", "NEXTN" or "DSPARK" (its block is one less than the width).
        width: verify width (1 = plain decode).
        accept: accept length that is simulated.
        relay: "merged" (one graph per step) or "three"; the same thing for plain decoding.
        metadata: "in_graph", "glue" or "eager".
        draft_tokens: ids in this rank's share of a reduced draft head (--speculative-token-map); None = all.
    """

    algorithm: str
    width: int
    accept: float
    relay: str = "merged"
    metadata: str = "in_graph"
    draft_tokens: int | None = None

    @property
    def block(self) -> int | None:
        """Block size of the drafter; None where the NEXTN layer is loaded."""
        return self.width - 1 if self.algorithm == "DSPARK" else None


class Bench:
    """A worker's decode step under graphs.

    Attributes:
        first_step_s: seconds of the first eager step: it compiles what no earlier row needed.
    """

    def __init__(self, runner: ModelRunner, row: Row, context: int):
        self.runner, self.row, self.context = runner, row, context
        runner.metadata_mode = row.metadata
        if row.draft_tokens is not None:  # the head of the rows after it too
            runner.draft_model.use_token_map(range(row.draft_tokens))
        self.worker = WORKERS[row.algorithm](runner)
        runner.simulated_accept = None if row.algorithm == "plain" else row.accept
        self.step: StepInput = greedy_step(runner, row.width)
        set_length(runner, context)
        begin = time.perf_counter()
        self.worker.decode(self.step)
        torch.cuda.synchronize()
        self.first_step_s = time.perf_counter() - begin
        self.graphs = GraphRunner(runner, self.worker, [1], [row.width], merged=row.relay == "merged")
        self.graphs.capture([SamplingFlags()])
        self._pending = None

    def round(self) -> None:
        """Launch one step, then take the previous step's result."""
        self.runner.begin_step(self.row.width)
        launched = self.runner.copy_result(self.graphs.decode(self.step))
        if self._pending is not None:
            self._pending.wait()
        self._pending = launched

    def drain(self) -> None:
        """Take the last result."""
        if self._pending is not None:
            self._pending.wait()
        self._pending = None
        torch.cuda.synchronize()

    def rounds(self, count: int) -> list[float]:
        """Milliseconds from start to start of ``count`` consecutive rounds."""
        set_length(self.runner, self.context)
        for _ in range(10):
            self.round()
        self.runner.device_clock.reset()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for mark in marks[:-1]:
            mark.record()
            self.round()
        marks[-1].record()
        self.drain()
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]

    def replays(self) -> list[tuple[str, torch.cuda.CUDAGraph]]:
        """The graphs of one round, in order."""
        return self.graphs.replays(1, self.row.width, SamplingFlags())

    def spans(self) -> dict[str, float]:
        """Median milliseconds of each graph in an unbroken sequence of rounds."""
        set_length(self.runner, self.context)
        marks = []
        for _ in range(SPAN_ROUNDS):
            for name, graph in self.replays():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                marks.append((name, start, end))
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for name, start, end in marks:
            times.setdefault(name, []).append(start.elapsed_time(end))
        return {name: statistics.median(values) for name, values in times.items()}

    def launch_us(self) -> dict[str, float]:
        """Median host microseconds to enqueue a step with nothing queued before it: in all, and of each graph in turn.

        The parts are the bare replays, the first of them into an empty queue; what the whole takes beyond their sum is
        Python. A full queue would make the host wait, hence the synchronisation before every step.
        """
        times: dict[str, list[float]] = {"step": []}
        for _ in range(LAUNCHES):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.graphs.decode(self.step)
            times["step"].append(time.perf_counter() - begin)
        replays = self.replays()
        for _ in range(LAUNCHES):
            torch.cuda.synchronize()
            for name, graph in replays:
                begin = time.perf_counter()
                graph.replay()
                times.setdefault(name, []).append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        return {name: 1e6 * statistics.median(values) for name, values in times.items()}

    def distinct_experts(self) -> list[int]:
        """Distinct routed experts of each MoE layer of one verify (eager), target layers only."""
        counts, true = [], moe.grouped_topk

        def recorded(*args):
            weights, ids = true(*args)
            counts.append(ids.unique().numel())
            return weights, ids

        set_length(self.runner, self.context)
        self.worker.metadata.before_step(self.step)
        moe.grouped_topk = recorded
        try:
            (self.worker.step if self.row.width == 1 else self.worker.verify)(self.step)
        finally:
            moe.grouped_topk = true
        return counts
