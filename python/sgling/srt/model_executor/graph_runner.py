"""CUDA graphs of the decode steps: one per step, batch bucket, width and sampling variant, in one memory pool.

A graph reads one static input, the request rows of its bucket; everything else (lengths, tokens, slots, sampling
parameters) is gathered inside it through those rows. It leaves its result in a persistent buffer. Rows behind the batch
are row 0, the dummy of every pool, and are rewritten before each replay.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.step import PrefillInput, StepInput, StepOutput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling_kernel.dispatch import usable
from sgling_kernel.sampling import SamplingFlags

logger = logging.getLogger(__name__)

WARM_UPS = 2
CAPTURED_ALGORITHMS = (None, "NEXTN")
VARIANTS = (
    SamplingFlags(),
    SamplingFlags(sampled=True),
    SamplingFlags(sampled=True, top_k=True, top_p=True, min_p=True),
)

DeviceStep = Callable[[StepInput], StepOutput | None]


class GraphableWorker(Protocol):
    """A worker whose decode is a fixed sequence of device steps that talk through persistent buffers only."""

    def device_steps(self) -> tuple[tuple[str, DeviceStep], ...]:
        """(name, function) in execution order; exactly one of them returns the result of the step."""

    def decode(self, step: StepInput) -> StepOutput:
        """All of them in order, without graphs."""

    def prefill(self, step: PrefillInput) -> StepOutput:
        """One chunk of a prompt."""


class GraphKey(NamedTuple):
    """What a graph was captured for."""

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


def variant_of(flags: SamplingFlags) -> SamplingFlags | None:
    """The cheapest captured variant that does everything ``flags`` ask for, or None.

    Filters that a request does not use are neutral in its row, so a wider variant gives the same tokens.
    """
    for variant in VARIANTS:
        if flags.union(variant) == variant:
            return variant
    return None


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, then multiples of 8 up to ``largest``, which is always among them."""
    sizes = {size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest}
    return tuple(sorted(sizes | {largest}))


def why_not_captured(runner: ModelRunner) -> str | None:
    """Reason why a GPU's decode steps all run eagerly, or None."""
    if runner.parallel.size > 1:
        return "capture is not built for tensor parallelism"
    if runner.needs_cpu_seq_lens:
        return f"{', '.join(runner.pinning_backends)} need exact lengths on the host"
    if runner.spec.algorithm not in CAPTURED_ALGORITHMS:
        return f"capture is not tested for {runner.spec.algorithm}"
    return None


def capture_graphs(args: ServerArgs, runner: ModelRunner, worker: GraphableWorker) -> GraphRunner | None:
    """Capture what a server's decode steps need; None on a CPU, when switched off, and where it is refused."""
    if runner.device != "cuda" or args.disable_cuda_graph or args.disable_decode_cuda_graph:
        return None
    if not usable("CUDA graphs", why_not_captured(runner)):
        return None
    largest = min(args.cuda_graph_max_bs_decode or runner.plan.max_running_requests, runner.plan.max_running_requests)
    buckets = args.cuda_graph_bs_decode or batch_buckets(largest)
    widths = range(1, runner.max_width + 1) if args.spec.depth == "auto" else (runner.max_width,)
    graphs = GraphRunner(runner, worker, [size for size in buckets if size <= largest] or [largest], widths)
    graphs.capture()
    return graphs


class GraphRunner:
    """Captures a worker's device steps and replays them; what no graph covers runs eagerly through the worker.

    Attributes:
        eager_steps: names of steps that run eagerly although they are captured (a replaced drafter).
        ran_eagerly: whether the latest decode step was covered by no graph.
        report: see :class:`GraphReport`.
    """

    def __init__(self, runner: ModelRunner, worker: GraphableWorker, buckets: Sequence[int], widths: Sequence[int]):
        self._runner = runner
        self._worker = worker
        self._buckets = sorted(buckets)
        self._widths = sorted(widths)
        self._rows = torch.zeros(self._buckets[-1], dtype=torch.int64, device=runner.device)
        self._packed = torch.zeros(self._buckets[-1], self._widths[-1] + 1, dtype=torch.int64, device=runner.device)
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self.eager_steps: set[str] = set()
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
        for bucket in reversed(self._buckets):
            for width in reversed(self._widths):
                for variant in variants:
                    for name, function in self._worker.device_steps():
                        key = GraphKey(name, bucket, width, variant)
                        if key not in self._graphs:
                            self._graphs[key] = self._capture(key, function)
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()
        seconds = self.report.seconds + time.perf_counter() - started
        added = max(0, free - torch.cuda.mem_get_info()[0])
        self.report = GraphReport(len(self._graphs), seconds, self.report.pool_bytes + added)
        logger.info("captured %d CUDA graphs in %.1f s, %.2f GB", len(self._graphs), seconds, added / 1e9)

    def _capture(self, key: GraphKey, function: DeviceStep) -> torch.cuda.CUDAGraph:
        """Warm up on padded rows only (they write nothing that lives), then record."""
        step = self._static_step(key)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function(step)
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool)
            output = function(step)
            if output is not None:
                self._pack(output, key)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _static_step(self, key: GraphKey) -> StepInput:
        return StepInput(
            req_pool_indices=self._rows[: key.bucket],
            width=key.width,
            kv_bound=self._runner.req_to_token.width,
            flags=key.variant,
            logprobs=None,
        )

    def _pack(self, output: StepOutput, key: GraphKey) -> None:
        """Result -> one persistent buffer [bucket, W tokens | accept length], copied to the host in one piece."""
        self._packed[: key.bucket, : key.width].copy_(output.tokens)
        self._packed[: key.bucket, key.width].copy_(output.accept_lens)

    # -- replay ----------------------------------------------------------------------------------------------------
    def why_not(self, step: StepInput) -> str | None:
        """Reason why no graph covers a step, or None."""
        if step.logprobs is not None:
            return "logprobs are returned"
        if step.verify_rows is not None:
            return "the verify rows are scheduled step by step"
        if variant_of(step.flags) is None:
            return "a request uses penalties, logit bias or a minimum length"
        if step.width not in self._widths:
            return f"width {step.width} is not captured"
        if len(step.req_pool_indices) > self._buckets[-1]:
            return f"{len(step.req_pool_indices)} requests exceed the largest bucket"
        return None

    @property
    def captured(self) -> dict[GraphKey, torch.cuda.CUDAGraph]:
        """Every graph by what it was captured for (a step trace watches their replays)."""
        return self._graphs

    def replays(self, bucket: int, width: int, variant: SamplingFlags) -> list[tuple[str, torch.cuda.CUDAGraph]]:
        """The graphs of one step by name, in order, for benchmarks; the last staged rows are what they read."""
        return [(name, self._graphs[GraphKey(name, bucket, width, variant)]) for name, _ in self._worker.device_steps()]

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
        self._rows[:count].copy_(step.req_pool_indices)
        if count < bucket:
            self._rows[count:bucket].zero_()
        self._runner.fence_result()  # the previous result must have left the packed buffer
        variant = variant_of(step.flags)
        for name, function in self._worker.device_steps():
            key = GraphKey(name, bucket, step.width, variant)
            if name in self.eager_steps:
                function(step)
            else:
                self._graphs[key].replay()
        packed = self._packed[:count, : step.width + 1]
        return StepOutput(packed[:, :-1], packed[:, -1], None, None, packed)
