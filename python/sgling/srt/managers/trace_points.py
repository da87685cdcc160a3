"""Which methods of a running scheduler a step trace watches, and what their spans are called."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from sgling.srt.layers.moe import SparseMoE
from sgling.srt.managers.launched import Launched
from sgling.srt.observability.rounds import LAUNCH, SLEEP, WAIT
from sgling.srt.observability.step_trace import DEVICE, StepTrace

_WORKER_STEPS = ("prefill", "draft", "verify", "commit", "extend")


class TracedScheduler(Protocol):
    """What of a scheduler is watched: its verbs, its parts, its step worker and its graphs (None without any)."""

    core: Any
    worker: Any
    graphs: Any

    def receive(self) -> None:
        """Take what has arrived."""

    def launch_next(self, in_flight: bool) -> Launched | None:
        """Enqueue one step."""

    def process(self, launched: Launched) -> None:
        """Apply a result."""


class CudaClock:
    """Events on the current stream, anchored to the host clock at one synchronised point."""

    def __init__(self) -> None:
        self._base = self.mark()
        self._base.synchronize()
        self._base_host = time.perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        """See :class:`sgling.srt.observability.step_trace.DeviceClock`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, mark: torch.cuda.Event) -> int:
        """See :class:`sgling.srt.observability.step_trace.DeviceClock`."""
        mark.synchronize()
        return self._base_host + round(self._base.elapsed_time(mark) * 1e6)


def describe_step(launched: Launched | None) -> dict:
    """Arguments of a launch span; empty when nothing was launched."""
    if launched is None:
        return {}
    kind = "decode" if launched.chunk is None else "prefill"
    return {"kind": kind, "requests": len(launched.reqs), "width": launched.width}


def watch_scheduler(trace: StepTrace, scheduler: TracedScheduler) -> None:
    """Watch the verbs of the loop, the device steps and the layers of both models.

    Layers replayed from a captured graph make no calls and so no spans: there the device steps are the finest.
    """
    core = scheduler.core
    trace.watch(scheduler, "receive", "receive")
    trace.watch(scheduler, "launch_next", LAUNCH, describe=describe_step)
    trace.watch(scheduler, "process", "process")
    trace.watch(core.inbox, "wait", SLEEP)
    trace.watch(core.decode, "next_batch", "plan batch")
    trace.watch(core, "send_outputs", "send")
    _watch_results(trace, scheduler)
    worker = scheduler.worker
    for step in _WORKER_STEPS:
        if hasattr(worker, step):
            trace.watch(worker, step, step, DEVICE)
    for key, graph in scheduler.graphs.captured.items() if scheduler.graphs else ():
        trace.watch(graph, "replay", key.step, DEVICE)
    if not hasattr(worker, "verify"):
        trace.watch(worker, "decode", "decode", DEVICE)
    for owner, method, name in _model_nodes(scheduler):
        trace.watch(owner, method, name, DEVICE)


def _watch_results(trace: StepTrace, scheduler: TracedScheduler) -> None:
    """Waiting for a result happens on a handle that is made anew for every step."""
    runner = scheduler.core.runner
    copy = runner.copy_result

    def copy_and_watch(output: Any) -> Any:
        handle = copy(output)
        trace.watch(handle, "wait", WAIT)
        return handle

    trace.shadows.replace(runner, "copy_result", copy_and_watch)
    trace.watch(runner, "copy_result", "copy result")


def _model_nodes(scheduler: TracedScheduler) -> Iterator[tuple[Any, str, str]]:
    """(owner, method, span name) of embeddings, layers and heads."""
    runner = scheduler.core.runner
    target = runner.model
    yield target.embed_tokens, "forward", "embedding"
    for layer_id, layer in enumerate(target.layers):
        yield from _layer_nodes(layer, f"L{layer_id}")
    yield target.logits_processor, "forward", "lm_head"
    drafter = runner.draft_model
    if hasattr(drafter, "layer"):
        yield drafter.eh_proj, "forward", "NEXTN eh_proj"
        yield from _layer_nodes(drafter.layer, "NEXTN")


def _layer_nodes(layer: Any, place: str) -> Iterator[tuple[Any, str, str]]:
    attention = type(layer.attention).__name__.removesuffix("Attention")
    yield layer.attention, "forward", f"{place} {attention}"
    yield layer.mlp, "forward_add", f"{place} {'MoE' if isinstance(layer.mlp, SparseMoE) else 'FFN'}"
