"""The graph runner without a GPU: a graph is replaced by the function it recorded, everything around it is real.

Shows that padded buckets, variants and fallbacks give the ids of eager steps; what a replay does is test/gpu's matter.
"""

from __future__ import annotations

import pytest
import torch

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.config.sweep_args import SweepArgs, at_fixed_depth
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.model_executor import graph_runner
from sgling.srt.model_executor.graph_runner import MASKED, VARIANTS, batch_buckets, variant_of
from sgling_kernel import dispatch
from sgling_kernel.sampling import SamplingFlags
from spec.fake_graphs import Recorded, with_graphs
from spec.harness import Harness, random_drafter, random_prompt, request

MASKED_PARAMS = (
    {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"logit_bias": {7: 2.0, 9: -100.0}},
    {"min_new_tokens": 5, "ignore_eos": False},
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def refused(monkeypatch):
    """Fast paths refused during the test."""
    monkeypatch.setattr(dispatch, "_refused", {})
    return dispatch._refused


def graphed(model_dir, buckets, merged=True, **kwargs) -> Harness:
    """A harness whose decode steps go through a graph runner."""
    return with_graphs(Harness(model_dir, **kwargs), buckets, merged)


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


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("params", MASKED_PARAMS)
def test_the_masked_variant_covers_what_adjusts_logits(model_dir, fake_cuda, params, merged):
    expected = ids(Harness(model_dir), 3, **params)
    harness = graphed(model_dir, [4], merged)
    assert ids(harness, 3, **params) == expected
    assert harness.core.decode_steps > 0
    assert Recorded.replays == harness.core.decode_steps * (1 if merged else 3)


def test_tables_of_the_masked_variant_stay_where_they_were_captured(model_dir, fake_cuda):
    harness = graphed(model_dir, [2])
    before = harness.core.runner.sampling.tables
    ids(harness, 2, **{name: value for params in MASKED_PARAMS for name, value in params.items()})
    after = harness.core.runner.sampling.tables
    tensors = [name for name in before._fields if name != "vocab_start"]
    assert [getattr(before, name).data_ptr() for name in tensors] == [
        getattr(after, name).data_ptr() for name in tensors
    ]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("algorithm", ["none", "NEXTN"])
@pytest.mark.parametrize("metadata", ["in_graph", "glue", "eager"])
def test_metadata_modes_give_the_same_ids(model_dir, fake_cuda, algorithm, metadata, merged):
    kwargs = {"speculative_algorithm": algorithm, "cuda_graph_metadata": metadata}
    expected = ids(Harness(model_dir, speculative_algorithm=algorithm), 3, temperature=0.8)
    assert ids(Harness(model_dir, **kwargs), 3, temperature=0.8) == expected
    assert ids(graphed(model_dir, [1, 2, 4], merged, **kwargs), 3, temperature=0.8) == expected


@pytest.mark.parametrize("metadata", ["in_graph", "glue", "eager"])
def test_a_replaced_drafter_turns_the_round_into_three_graphs(model_dir, fake_cuda, metadata):
    expected = ids(Harness(model_dir), 3)
    harness = graphed(model_dir, [1, 4], cuda_graph_metadata=metadata)
    assert {key.step for key in harness.scheduler.graphs.captured} == {"round"}
    harness.use_drafter(random_drafter(512))
    assert {key.step for key in harness.scheduler.graphs.captured} == {"round", "verify", "extend"}
    assert ids(harness, 3) == expected
    assert Recorded.replays >= 2 * harness.core.decode_steps


@pytest.mark.parametrize("name", ["draft", "verify", "extend"])
def test_any_device_step_may_run_eagerly_among_graphs(model_dir, fake_cuda, name):
    expected = ids(Harness(model_dir), 3)
    harness = graphed(model_dir, [4], cuda_graph_metadata="glue")
    harness.scheduler.graphs.run_eagerly(name)
    assert ids(harness, 3) == expected
    assert Recorded.replays == 2 * harness.core.decode_steps


def test_a_decode_step_outside_of_graphs_is_said_once_with_its_reason(model_dir, fake_cuda, refused):
    harness = graphed(model_dir, [2])
    ids(harness, 1)
    assert refused == {}
    for i in range(2):
        harness.run(request(f"p{i}", random_prompt(5, 9), max_new_tokens=3, logprobs=2 * i))
    assert refused == {"CUDA graph of a decode step": "logprobs are returned"}


def test_the_decode_log_line_tells_whether_the_step_was_a_replay(model_dir, fake_cuda, caplog):
    harness = graphed(model_dir, [2], decode_log_interval=1)
    with caplog.at_level("INFO"):
        ids(harness, 1)
        harness.run(request("p", random_prompt(5, 9), max_new_tokens=3, logprobs=0))
    lines = [record.getMessage() for record in caplog.records if "Decode batch" in record.getMessage()]
    assert ["cuda graph: True" in lines[0], "cuda graph: False" in lines[-1]] == [True, True]


@pytest.mark.parametrize(
    ("flags", "widths"),
    [({}, [4]), ({"cuda_graph_all_widths": True}, [1, 2, 3, 4]), ({"speculative_depth": "auto"}, [1, 2, 3, 4])],
)
def test_widths_that_steps_will_have_get_graphs(flags, widths):
    args = ServerArgs.from_kwargs(speculative_num_steps=3, device="cpu", **flags)
    assert list(graph_runner.captured_widths(args)) == widths


def test_measurements_of_narrow_steps_capture_every_width(monkeypatch):
    """Outside of graphs a narrow step is slow for the host's reasons, and the widest would always look best."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    sweep = SweepArgs.from_argv(["--max-steps", "3", "--concurrency", "2", "4"]).engine_flags()
    assert sweep["cuda_graph_all_widths"] and sweep["cuda_graph_max_bs_decode"] == 4
    assert at_fixed_depth(ServerArgs.from_kwargs())["cuda_graph_all_widths"]


def test_a_measurement_on_a_cpu_brings_no_flag_without_effect():
    """Notices are for what the user gave."""
    sweep = SweepArgs.from_argv(["--max-steps", "3", "--device", "cpu"]).engine_flags()
    assert ServerArgs.from_kwargs(**sweep).notices == ()
    assert ServerArgs.from_kwargs(**at_fixed_depth(ServerArgs.from_kwargs(device="cpu"))).notices == ()
    assert ServerArgs.from_kwargs(device="cpu", cuda_graph_all_widths=True).notices


def test_a_gpu_server_without_captured_graphs_says_why(model_dir, refused):
    harness = Harness(model_dir)
    runner = harness.core.runner
    runner.device, runner.parallel = "cuda", ParallelState(0, 2, None, None)
    assert graph_runner.capture_graphs(harness.core.args, runner, harness.scheduler.worker) is None
    assert refused == {"CUDA graphs": "capture of collectives was never tried on several GPUs"}


@pytest.mark.parametrize("merged", [True, False])
def test_capture_is_idempotent(model_dir, fake_cuda, merged):
    graphs = graphed(model_dir, [1, 2], merged).scheduler.graphs
    before = dict(graphs.captured)
    graphs.capture()
    assert graphs.captured == before and graphs.report.count == 2 * (1 if merged else 3) * len(VARIANTS)


def test_buckets_and_variants():
    assert batch_buckets(1) == (1,)
    assert batch_buckets(48) == (1, 2, 4, 8, 16, 24, 32, 40, 48)
    assert batch_buckets(5) == (1, 2, 4, 5)
    assert variant_of(SamplingFlags()) == VARIANTS[0]
    assert variant_of(SamplingFlags(sampled=True)) == VARIANTS[1]
    assert variant_of(SamplingFlags(sampled=True, min_p=True)) == VARIANTS[2]
    for name in ("penalties", "logit_bias", "min_tokens"):
        assert variant_of(SamplingFlags(**{name: True})) == MASKED
