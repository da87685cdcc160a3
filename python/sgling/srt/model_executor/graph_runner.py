"""CUDA graphs of the decode steps, by batch bucket, width and sampling variant, in one memory pool.

A step is one graph ("merged": draft, verify and extend side by side), or a relay of one graph per device step ("three",
and wherever one of them runs eagerly, such as a replaced drafter). A graph reads one static input, the request rows of
its bucket; everything else (lengths, tokens, slots, sampling parameters) is gathered inside it through those rows. It
leaves its result in a persistent buffer. Rows behind the batch are row 0, the dummy of every pool, and are rewritten
when the batch changes.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch

from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.step import PrefillInput, StepInput, StepOutput
from sgling.srt.model_executor.graph_capture import record
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.model_executor.step_metadata import MetadataSource
from sgling_kernel.dispatch import usable
from sgling_kernel.sampling import SamplingFlags

logger = logging.getLogger(__name__)

GREEDY = SamplingFlags()
SAMPLED = SamplingFlags(sampled=True)
FILTERED = SamplingFlags(sampled=True, top_k=True, top_p=True, min_p=True)
MASKED = SamplingFlags(*(True for _ in SamplingFlags._fields))  # penalties, logit bias and minimum lengths too
VARIANTS = (GREEDY, SAMPLED, FILTERED, MASKED)
MERGED = "round"  # name of a graph that holds all device steps of a round

DeviceStep = Callable[[StepInput], StepOutput | None]


class GraphableWorker(Protocol):
    """A worker whose decode is a fixed sequence of device steps that talk through persistent buffers only.

    Attributes:
        metadata: where the rows of a step live.
    """

    metadata: MetadataSource

    def device_steps(self) -> tuple[tuple[str, DeviceStep], ...]:
        """(name, function) in execution order; exactly one of them returns the result of the step."""

    def decode(self, step: StepInput) -> StepOutput:
        """All of them in order, without graphs."""

    def prefill(self, step: PrefillInput) -> StepOutput:
        """One chunk of a prompt."""


class GraphKey(NamedTuple):
    """What a graph was captured for; ``step`` names a device step, or all of them (``MERGED``)."""

    step: str
    bucket: int
    width: int
    variant: SamplingFlags


class GraphReport(NamedTuple):
    """What capture did.

    Attributes:
        count: graphs held.
        seconds: wall time of all captures, kernel compilation included.
        pool_bytes: device memory that capture added.
    """

    count: int
    seconds: float
    pool_bytes: int


@cache
def variant_of(flags: SamplingFlags) -> SamplingFlags:
    """The cheapest captured variant that does everything ``flags`` ask for.

    What a request does not use is neutral in its row, so a wider variant gives the same tokens.
    """
    return next(variant for variant in VARIANTS if flags.union(variant) == variant)


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, then multiples of 8 up to ``largest``, which is always among them."""
    sizes = {size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest}
    return tuple(sorted(sizes | {largest}))


def captured_widths(args: ServerArgs) -> Sequence[int]:
    """Widths that get graphs: the widest alone, or all of them where steps choose or requests are known to narrow."""
    every = args.spec.depth == "auto" or args.cuda_graph_all_widths
    return range(1 if every else args.spec.width, args.spec.width + 1)


def why_not_captured(runner: ModelRunner) -> str | None:
    """Reason why a GPU's decode steps all run eagerly, or None."""
    if runner.parallel.size > 1:
        return "capture of collectives was never tried on several GPUs"
    if runner.needs_cpu_seq_lens:
        return f"{', '.join(runner.pinning_backends)} need exact lengths on the host"
    if runner.spec.dspark is not None and runner.spec.dspark.scheduled:
        return "the number of verify rows is scheduled step by step"
    return None


def capture_graphs(args: ServerArgs, runner: ModelRunner, worker: GraphableWorker) -> GraphRunner | None:
    """Capture what a server's decode steps need; None on a CPU, when switched off, and where it is refused."""
    if runner.device != "cuda" or args.disable_cuda_graph or args.disable_decode_cuda_graph:
        return None
    if not usable("CUDA graphs", why_not_captured(runner)):
        return None
    largest = min(args.cuda_graph_max_bs_decode or runner.plan.max_running_requests, runner.plan.max_running_requests)
    buckets = args.cuda_graph_bs_decode or batch_buckets(largest)
    fitting = [size for size in buckets if size <= largest] or [largest]
    graphs = GraphRunner(runner, worker, fitting, captured_widths(args), merged=args.cuda_graph_relay == "merged")
    graphs.capture()
    return graphs


class GraphRunner:
    """Captures a worker's device steps and replays them; what no graph covers runs eagerly through the worker.

    Attributes:
        merged: whether a step is one graph as long as none of its device steps runs eagerly.
        ran_eagerly: whether the latest decode step was covered by no graph.
        report: see :class:`GraphReport`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        worker: GraphableWorker,
        buckets: Sequence[int],
        widths: Sequence[int],
        merged: bool = True,
    ):
        self._runner = runner
        self._worker = worker
        self.merged = merged
        self._buckets = sorted(buckets)
        self._widths = sorted(widths)
        self._rows = torch.zeros(self._buckets[-1], dtype=torch.int64, device=runner.device)
        # results [bucket, W tokens | accept length], copied out behind every step
        self._packed = torch.zeros(self._buckets[-1], self._widths[-1] + 1, dtype=torch.int64, device=runner.device)
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._eager_steps: set[str] = set()
        self._variants: tuple[SamplingFlags, ...] = ()
        self._staged: tuple[torch.Tensor | None, int] = (None, 0)  # what the static rows hold: (source, bucket)
        self.ran_eagerly = False
        self.report = GraphReport(0, 0.0, 0)

    # -- capture ---------------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def capture(self, variants: Sequence[SamplingFlags] = VARIANTS) -> None:
        """Capture everything that is missing, largest first. Running it again replaces nothing.

        The garbage collector is emptied and frozen afterwards: a collection during decode costs a step.
        """
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        torch.cuda.synchronize()
        self._rows.zero_()
        self._staged = (None, 0)
        self._variants = tuple(variants)
        for variant in variants:
            self._runner.sampling.allocate(variant)  # a table that came later would not be the captured one
        self._worker.metadata.reset()
        for bucket in reversed(self._buckets):
            for width in reversed(self._widths):
                self._capture_width(bucket, width)
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()
        seconds = self.report.seconds + time.perf_counter() - started
        added = max(0, free - torch.cuda.mem_get_info()[0])
        self.report = GraphReport(len(self._graphs), seconds, self.report.pool_bytes + added)
        logger.info("captured %d CUDA graphs in %.1f s, %.2f GB", len(self._graphs), seconds, added / 1e9)

    def _capture_width(self, bucket: int, width: int) -> None:
        """Every graph of one bucket and width that is missing, on padded rows: they write nothing that lives."""
        metadata = self._worker.metadata
        metadata.capture(self._static_step(bucket, width, GREEDY))
        for variant in self._variants:
            step = self._static_step(bucket, width, variant)
            metadata.before_step(step, padded=True)
            for name, functions in self._segments():
                key = GraphKey(name, bucket, width, variant)
                if name not in self._eager_steps and key not in self._graphs:
                    self._graphs[key] = record(partial(self._run, functions, step), self._stream, self._pool)

    def _segments(self) -> list[tuple[str, tuple[DeviceStep, ...]]]:
        """(graph name, device steps in it) in execution order."""
        steps = self._worker.device_steps()
        if self.merged and len(steps) > 1 and not self._eager_steps:
            return [(MERGED, tuple(function for _, function in steps))]
        return [(name, (function,)) for name, function in steps]

    def _run(self, functions: Sequence[DeviceStep], step: StepInput) -> None:
        """What a graph records; the device step that has a result also leaves it in ``step.packed``."""
        with self._worker.metadata.one_fill():
            for function in functions:
                function(step)

    def run_eagerly(self, name: str) -> None:
        """Run a device step through the worker from now on (a replaced drafter); the others stay graphs, one each."""
        self._eager_steps.add(name)
        self.capture(self._variants)

    def _static_step(self, bucket: int, width: int, variant: SamplingFlags) -> StepInput:
        return StepInput(
            req_pool_indices=self._rows[:bucket],
            width=width,
            kv_bound=self._runner.req_to_token.width,
            flags=variant,
            logprobs=None,
            packed=self._packed[:bucket, : width + 1],
        )

    # -- replay ----------------------------------------------------------------------------------------------------
    def why_not(self, step: StepInput) -> str | None:
        """Reason why no graph covers a step, or None."""
        if step.logprobs is not None:
            return "logprobs are returned"
        if step.verify_rows is not None:
            return "the verify rows are scheduled step by step"
        if variant_of(step.flags) not in self._variants:
            return "a request needs a sampling variant that is not captured"
        if step.width not in self._widths:
            return f"width {step.width} is not captured"
        if len(step.req_pool_indices) > self._buckets[-1]:
            return f"{len(step.req_pool_indices)} requests exceed the largest bucket"
        return None

    def describe(self) -> dict:
        """For ``/server_info``: the capture report, the relay and where metadata are worked out."""
        relay = "merged" if self.merged else "three"
        return {**self.report._asdict(), "relay": relay, "metadata": self._worker.metadata.name}

    @property
    def captured(self) -> dict[GraphKey, torch.cuda.CUDAGraph]:
        """Every graph by what it was captured for (a step trace watches their replays)."""
        return self._graphs

    def replays(self, bucket: int, width: int, variant: SamplingFlags) -> list[tuple[str, torch.cuda.CUDAGraph]]:
        """The graphs of one step by name, in order, for benchmarks; the last staged rows are what they read."""
        return [(name, self._graphs[GraphKey(name, bucket, width, variant)]) for name, _ in self._segments()]

    def prefill(self, step: PrefillInput) -> StepOutput:
        """Prefill is never captured: its shapes are the prompt's."""
        return self._worker.prefill(step)

    def decode(self, step: StepInput) -> StepOutput:
        """One decode step: graph replays where they exist, else the worker's own functions."""
        self.ran_eagerly = not usable("CUDA graph of a decode step", self.why_not(step))
        if self.ran_eagerly:
            return self._worker.decode(step)
        count = len(step.req_pool_indices)
        bucket = next(size for size in self._buckets if size >= count)
        self._stage(step.req_pool_indices, bucket)
        static = self._static_step(bucket, step.width, variant_of(step.flags))
        self._worker.metadata.before_step(static, padded=count < bucket)
        packed = self._packed[:count, : step.width + 1]
        for name, functions in self._segments():
            if name in self._eager_steps:  # real rows only: a drafter from outside may know no padding
                functions[0](step._replace(packed=packed))
            else:
                self._graphs[GraphKey(name, bucket, step.width, static.flags)].replay()
        # The next step packs over it and must not wait for the host's copy; the result keeps this cached block alive.
        packed = packed.clone()
        return StepOutput(packed[:, :-1], packed[:, -1], None, None, packed)

    def _stage(self, rows: torch.Tensor, bucket: int) -> None:
        """Request rows into the static input, padding behind them; an unchanged batch launches nothing."""
        if self._staged[0] is rows and self._staged[1] == bucket:
            return
        count = len(rows)
        self._rows[:count].copy_(rows)
        if count < bucket:
            self._rows[count:bucket].zero_()
        self._staged = (rows, bucket)
