"""Metadata sources: same buffers in every mode, and the four mechanisms that make the glue graph safe."""

from __future__ import annotations

import pytest
import torch

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.core.forward_batch import ForwardMode
from sgling.srt.core.step import StepInput
from sgling.srt.model_executor import graph_capture, metadata_glue
from sgling.srt.model_executor.metadata_registry import SOURCES, create_metadata
from sgling_kernel import dispatch
from sgling_kernel.sampling import SamplingFlags
from spec.fake_graphs import Recorded, fake_record, with_graphs
from spec.harness import Harness, random_prompt, request

WIDTH = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def runner(model_dir):
    """A runner whose rows 1 and 2 have lengths, slots and pages; nothing runs on it."""
    runner = Harness(model_dir).core.runner
    runner.req_to_token.write(1, 0, list(range(10, 40)))
    runner.req_to_token.write(2, 0, list(range(50, 80)))
    runner.future.new_seq_lens[1:3] = torch.tensor([5, 9])
    runner.future.state_slot[1:3] = torch.tensor([2, 1])
    return runner


@pytest.fixture
def refused(monkeypatch):
    """Fast paths refused during the test."""
    monkeypatch.setattr(dispatch, "_refused", {})
    return dispatch._refused


def step_of(rows: torch.Tensor, width: int = WIDTH) -> StepInput:
    return StepInput(rows, width, 512, SamplingFlags(), None)


def source(runner, name: str):
    runner.metadata_mode = name
    return create_metadata(runner, ForwardMode.TARGET_VERIFY, lambda step: step.width)


@pytest.mark.parametrize("name", SOURCES)
def test_every_mode_gives_lengths_slots_and_windows(runner, name):
    metadata, step = source(runner, name), step_of(torch.tensor([2, 0, 1]))
    metadata.before_step(step)
    made = metadata.at_start(step)
    assert made.seq_lens.tolist() == [9, 0, 5] and made.state_slots.tolist() == [1, 0, 2]
    assert made.positions.tolist() == [[9, 10, 11, 12], [0, 1, 2, 3], [5, 6, 7, 8]]
    assert made.locs.tolist() == [[59, 60, 61, 62], [0] * 4, [15, 16, 17, 18]]
    runner.future.new_seq_lens[1] = 7  # what publish does; extend still works on the window of the step
    assert metadata.of_step(step).seq_lens.tolist() == [9, 0, 5]
    locs, positions = metadata.of_step(step).window(2)
    assert locs.tolist() == [59, 60, 0, 0, 15, 16] and positions.tolist() == [9, 10, 0, 1, 5, 6]


def test_device_steps_of_one_graph_fill_once_and_the_next_graph_again(runner):
    metadata, step = source(runner, "in_graph"), step_of(torch.tensor([1]))
    with metadata.one_fill():
        assert metadata.at_start(step).seq_lens.tolist() == [5]
        runner.future.new_seq_lens[1] = 7
        assert metadata.at_start(step).seq_lens.tolist() == [5]
    assert metadata.at_start(step).seq_lens.tolist() == [7]
    runner.future.new_seq_lens[1] = 8
    with metadata.one_fill():
        assert metadata.at_start(step).seq_lens.tolist() == [8]


@pytest.mark.parametrize("name", SOURCES)
def test_metadata_that_nobody_made_are_an_error(runner, name):
    metadata = source(runner, name)
    with pytest.raises(RuntimeError, match="made for 0 x 0"):
        metadata.of_step(step_of(torch.tensor([1])))
    metadata.before_step(step_of(torch.tensor([1])))
    with pytest.raises(RuntimeError, match="2 x 4 rows reads metadata made for 1 x 4"):
        metadata.of_step(step_of(torch.tensor([1, 2])))
    with pytest.raises(RuntimeError, match="1 x 3 rows"):
        metadata.of_step(step_of(torch.tensor([1]), width=3))


def recorded(runner, rows: torch.Tensor):
    metadata = source(runner, "glue")
    metadata.capture(step_of(rows))
    return metadata


def test_warm_ups_come_before_the_recording(monkeypatch, fake_cuda):
    events = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            events.append(f"begin {capture_error_mode}")

        def capture_end(self):
            events.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    graph_capture.record(lambda: events.append("run"), torch.cuda.Stream(), 0, "thread_local")
    assert events == ["run", "run", "begin thread_local", "run", "end"]


def test_a_failed_recording_is_ended_and_reported(monkeypatch, fake_cuda):
    ended = []

    class Graph:
        def capture_begin(self, pool, capture_error_mode):
            """Nothing."""

        def capture_end(self):
            ended.append(True)
            raise RuntimeError("capture was invalidated")

    calls = iter([None, None, RuntimeError("not capturable")])

    def function():
        error = next(calls)
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    with pytest.raises(RuntimeError, match="not capturable"):
        graph_capture.record(function, torch.cuda.Stream(), 0)
    assert ended == [True]


def test_a_replay_installs_the_metadata_it_was_recorded_with(runner, fake_cuda):
    rows = torch.tensor([1, 2])
    metadata = recorded(runner, rows)
    metadata.refill(step_of(torch.tensor([2]), width=2))  # another step's metadata are the last that Python saw
    runner.future.new_seq_lens[1] = 6
    metadata.before_step(step_of(rows))
    assert Recorded.replays == 1
    assert metadata.at_start(step_of(rows)).positions.tolist() == [[6, 7, 8, 9], [9, 10, 11, 12]]


@pytest.mark.parametrize(
    ("rows", "width", "padded", "reason"),
    [
        ("own", WIDTH, True, "smaller than its bucket"),
        ("own", 2, False, "nothing is recorded"),
        ("others", WIDTH, False, "rows that were recorded"),
        ("fewer", WIDTH, False, "nothing is recorded"),
    ],
)
def test_where_a_replay_would_be_wrong_metadata_are_eager(runner, fake_cuda, rows, width, padded, reason):
    own = torch.tensor([1, 2])
    metadata = recorded(runner, own)
    step = step_of({"own": own, "others": torch.tensor([2, 1]), "fewer": own[:1]}[rows], width)
    assert reason in metadata.why_not(step, padded)
    metadata.before_step(step, padded)
    assert Recorded.replays == 0
    assert metadata.at_start(step).seq_lens.tolist() == runner.future.new_seq_lens[step.req_pool_indices].tolist()


def test_decode_and_verify_of_one_width_share_no_graph(runner, fake_cuda):
    key = metadata_glue.GlueKey(1, 1, ForwardMode.DECODE)
    assert key != key._replace(mode=ForwardMode.TARGET_VERIFY)
    metadata = recorded(runner, torch.tensor([1, 2]))
    assert {key.mode for key in metadata._graphs} == {ForwardMode.TARGET_VERIFY}


def test_a_failed_recording_means_eager_metadata_for_good_and_is_said_once(
    model_dir, fake_cuda, monkeypatch, refused, caplog
):
    expected = Harness(model_dir).run(request("a", random_prompt(9, 1)))["a"].ids

    def fails(*args, **kwargs):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(metadata_glue, "record", fails)
    with caplog.at_level("WARNING"):
        harness = with_graphs(Harness(model_dir, cuda_graph_metadata="glue"), [1, 2])
        monkeypatch.setattr(metadata_glue, "record", fake_record)
        harness.scheduler.graphs.capture()
    assert harness.run(request("a", random_prompt(9, 1)))["a"].ids == expected
    metadata = harness.scheduler.worker.metadata
    assert metadata._graphs == {} and "recording failed" in metadata.why_not(step_of(torch.tensor([1])), False)
    assert list(refused) == ["metadata glue graph"]
    assert sum("metadata glue graph" in record.getMessage() for record in caplog.records) == 1


def test_a_new_owner_of_the_graphs_records_again(model_dir, fake_cuda):
    harness = with_graphs(Harness(model_dir, cuda_graph_metadata="glue"), [1])
    worker = harness.scheduler.worker
    first = {key: entry.rows.data_ptr() for key, entry in worker.metadata._graphs.items()}
    with_graphs(harness, [1, 2])
    second = {key: entry.rows.data_ptr() for key, entry in worker.metadata._graphs.items()}
    assert len(second) == 2 and all(second[key] != pointer for key, pointer in first.items())
    assert (
        harness.run(request("a", random_prompt(9, 1)))["a"].ids
        == Harness(model_dir).run(request("a", random_prompt(9, 1)))["a"].ids
    )


def test_the_upstream_switch_selects_the_glue_graph(model_dir, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    assert Harness(model_dir).scheduler.worker.metadata.name == "glue"
    assert Harness(model_dir, cuda_graph_metadata="eager").scheduler.worker.metadata.name == "eager"
