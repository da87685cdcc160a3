"""CUDA graphs without a GPU: a graph is replaced by the function it recorded, everything around it is real."""

from __future__ import annotations

import contextlib

import pytest
import torch

from sgling.srt.model_executor import graph_capture, graph_runner, metadata_glue
from sgling.srt.model_executor.graph_runner import GraphRunner
from spec.harness import Harness


class Recorded:
    """Stands in for a CUDA graph: ``replay`` calls what was recorded."""

    replays = 0

    def __init__(self, function):
        self._function = function

    def replay(self):
        Recorded.replays += 1
        self._function()


class NoStream:
    """Stands in for a CUDA stream."""

    def wait_stream(self, other):
        """One stream only."""


def fake_record(function, stream, pool, error_mode="global"):
    """Warm-ups, then a graph that remembers the function."""
    for _ in range(graph_capture.WARM_UPS):
        function()
    return Recorded(function)


@pytest.fixture
def fake_cuda(monkeypatch):
    """No device: streams do nothing, graphs remember their function. The collector is left alone."""
    replacements = {
        "Stream": NoStream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": NoStream,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: 0,
        "mem_get_info": lambda: (0, 0),
    }
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graph_runner.gc, "freeze", lambda: None)
    for module in (graph_runner, metadata_glue):
        monkeypatch.setattr(module, "record", fake_record)
    monkeypatch.setattr(Recorded, "replays", 0)


def with_graphs(harness: Harness, buckets: list[int], merged: bool = True) -> Harness:
    """Send the decode steps of a harness through a graph runner."""
    scheduler = harness.scheduler
    runner = scheduler.core.runner
    scheduler.graphs = GraphRunner(runner, scheduler.worker, buckets, [runner.max_width], merged)
    scheduler.graphs.capture()
    scheduler.steps._worker = scheduler.graphs
    return harness
