"""The graph runner without a GPU: a graph is replaced by the function it recorded, everything around it is real.

Shows that padded buckets, variants and fallbacks give the ids of eager steps; what a replay does is test/gpu's matter.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.model_executor import graph_runner
from sgling.srt.model_executor.graph_runner import VARIANTS, GraphRunner, batch_buckets, variant_of
from sgling_kernel import dispatch
from sgling_kernel.sampling import SamplingFlags
from spec.harness import Harness, random_prompt, request


class Recorded:
    """Stands in for a CUDA graph: ``replay`` calls what was captured."""

    replays = 0

    def __init__(self):
        self.run = None

    def capture_begin(self, pool):
        """Nothing is recorded."""

    def capture_end(self):
        """Nothing is recorded."""

    def replay(self):
        Recorded.replays += 1
        self.run()


class NoStream:
    """Stands in for a CUDA stream."""

    def wait_stream(self, other):
        """One stream only."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def fake_cuda(monkeypatch):
    """No device: streams do nothing, graphs remember their function. The collector is left alone."""
    replacements = {
        "CUDAGraph": Recorded,
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
    real = GraphRunner._capture

    def capture(self, key, function):
        graph, step = real(self, key, function), self._static_step(key)

        def run():
            output = function(step)
            if output is not None:
                self._pack(output, key)

        graph.run = run
        return graph

    monkeypatch.setattr(GraphRunner, "_capture", capture)
    monkeypatch.setattr(Recorded, "replays", 0)


@pytest.fixture
def refused(monkeypatch):
    """Fast paths refused during the test."""
    monkeypatch.setattr(dispatch, "_refused", {})
    return dispatch._refused


def graphed(model_dir, buckets, **kwargs) -> Harness:
    """A harness whose decode steps go through a graph runner."""
    harness = Harness(model_dir, **kwargs)
    scheduler = harness.scheduler
    runner = scheduler.core.runner
    scheduler.graphs = GraphRunner(runner, scheduler.worker, buckets, [runner.max_width])
    scheduler.graphs.capture()
    scheduler.steps._worker = scheduler.graphs
    return harness


def ids(harness: Harness, count: int, **params) -> dict[str, list[int]]:
    requests = [
        request(f"r{i}", random_prompt(5 + i, i), max_new_tokens=8 + i, **(params if i % 2 else {}))
        for i in range(count)
    ]
    return {rid: outcome.ids for rid, outcome in harness.run(*requests).items()}


@pytest.mark.parametrize("algorithm", ["none", "NEXTN"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_padded_buckets_give_the_ids_of_eager_steps(model_dir, fake_cuda, algorithm, count):
    sampled = {"temperature": 0.9, "top_p": 0.9}
    expected = ids(Harness(model_dir, speculative_algorithm=algorithm), count, **sampled)
    harness = graphed(model_dir, [1, 4], speculative_algorithm=algorithm)
    assert ids(harness, count, **sampled) == expected
    assert Recorded.replays > 0


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.5}, {"logit_bias": {7: 2.0}}, {"min_new_tokens": 3}])
def test_what_no_graph_covers_runs_eagerly(model_dir, fake_cuda, params):
    expected = ids(Harness(model_dir), 2, **params)
    harness = graphed(model_dir, [2])
    assert ids(harness, 2, **params) == expected
    assert harness.scheduler.graphs.why_not(step_with(harness, SamplingFlags(penalties=True))) is not None


def test_a_decode_step_outside_of_graphs_is_said_once_with_its_reason(model_dir, fake_cuda, refused):
    harness = graphed(model_dir, [2])
    ids(harness, 1)
    assert refused == {}
    harness.run(request("p", random_prompt(5, 9), max_new_tokens=3, frequency_penalty=0.5))
    assert refused == {"CUDA graph of a decode step": "a request uses penalties, logit bias or a minimum length"}


def test_the_decode_log_line_tells_whether_the_step_was_a_replay(model_dir, fake_cuda, caplog):
    harness = graphed(model_dir, [2], decode_log_interval=1)
    with caplog.at_level("INFO"):
        ids(harness, 1)
        harness.run(request("p", random_prompt(5, 9), max_new_tokens=3, presence_penalty=0.5))
    lines = [record.getMessage() for record in caplog.records if "Decode batch" in record.getMessage()]
    assert ["cuda graph: True" in lines[0], "cuda graph: False" in lines[-1]] == [True, True]


def test_a_gpu_server_without_captured_graphs_says_why(model_dir, refused):
    harness = Harness(model_dir)
    runner = harness.core.runner
    runner.device, runner.parallel = "cuda", ParallelState(0, 2, None, None)
    assert graph_runner.capture_graphs(harness.core.args, runner, harness.scheduler.worker) is None
    assert refused == {"CUDA graphs": "capture is not built for tensor parallelism"}


def step_with(harness: Harness, flags: SamplingFlags):
    graphs = harness.scheduler.graphs
    return graphs._static_step(graph_runner.GraphKey("verify", 1, harness.core.runner.max_width, flags))


def test_capture_is_idempotent(model_dir, fake_cuda):
    graphs = graphed(model_dir, [1, 2]).scheduler.graphs
    before = dict(graphs.captured)
    graphs.capture()
    assert graphs.captured == before and graphs.report.count == 2 * 3 * len(VARIANTS)


def test_buckets_and_variants():
    assert batch_buckets(1) == (1,)
    assert batch_buckets(48) == (1, 2, 4, 8, 16, 24, 32, 40, 48)
    assert batch_buckets(5) == (1, 2, 4, 5)
    assert variant_of(SamplingFlags()) == VARIANTS[0]
    assert variant_of(SamplingFlags(sampled=True)) == VARIANTS[1]
    assert variant_of(SamplingFlags(sampled=True, min_p=True)) == VARIANTS[2]
    assert variant_of(SamplingFlags(penalties=True)) is None
