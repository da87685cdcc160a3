"""Profiling a running scheduler: the files hold named steps, the output does not change, nothing stays behind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.managers import profiler
from sgling.srt.managers.io_struct import ProfileReq, ProfileReqOutput
from sgling.srt.observability.rounds import find_rounds, summary
from sgling.srt.observability.step_trace import read_trace
from spec.harness import Harness, random_prompt, request

PROMPT = random_prompt(12, seed=1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


def own_attributes(harness: Harness) -> list[set]:
    scheduler, runner = harness.scheduler, harness.core.runner
    owners = [scheduler, scheduler.worker, scheduler.core, harness.core.inbox, runner, runner.model.layers[0].mlp]
    return [set(vars(owner)) for owner in owners]


def answers(harness: Harness) -> list[ProfileReqOutput]:
    return [message for message in harness.messages if isinstance(message, ProfileReqOutput)]


@pytest.mark.parametrize("algorithm", ["NEXTN", "none"])
def test_a_profile_names_the_steps_and_changes_nothing(model_dir, tmp_path, algorithm):
    plain = Harness(model_dir, speculative_algorithm="none").run(request("a", PROMPT))["a"].ids
    harness = Harness(model_dir, speculative_algorithm=algorithm)
    before = own_attributes(harness)
    harness.send(ProfileReq("p", output_dir=str(tmp_path)))
    assert harness.run(request("a", PROMPT))["a"].ids == plain
    harness.send(ProfileReq("q", stop=True))
    harness.run()
    assert own_attributes(harness) == before
    started, stopped = answers(harness)
    assert (started.success, stopped.success) == (True, True)
    spans, facts = read_trace(Path(stopped.files[0]))
    names = {span.name for span in spans}
    steps = {"draft", "verify", "commit", "extend", "NEXTN MoE"} if algorithm == "NEXTN" else {"decode"}
    assert steps | {"receive", "launch", "process", "prefill", "L0 KDA", "L0 FFN", "L3 MLA", "L4 MoE"} <= names
    assert facts["steps"] >= 3
    figures = summary(find_rounds(spans))
    assert figures["rounds"] >= 3 and 0 <= figures["device_idle"] < 1


def test_a_recording_of_some_steps_ends_by_itself(model_dir, tmp_path):
    harness = Harness(model_dir)
    before = own_attributes(harness)
    harness.send(ProfileReq("p", output_dir=str(tmp_path), start_step=3, num_steps=4, profile_prefix="mine"))
    harness.run(request("a", PROMPT))
    assert own_attributes(harness) == before
    (path,) = tmp_path.glob("mine-*-TP-0.trace.json.gz")
    spans, facts = read_trace(path)
    assert facts["steps"] == sum(bool(span.args.get("kind")) for span in spans) == 4
    harness.send(ProfileReq("q", stop=True))
    harness.run()
    assert answers(harness)[-1].files == [str(path)]


def test_torch_profiler_carries_the_same_names(model_dir, tmp_path):
    harness = Harness(model_dir)
    harness.send(ProfileReq("p", output_dir=str(tmp_path), start_step=1, num_steps=2, activities=["CPU", "GPU"]))
    harness.run(request("a", PROMPT))
    (path,) = tmp_path.glob("*.torch.trace.json.gz")
    with gzip.open(path, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"verify", "extend", "L0 KDA"} <= names


def test_a_profile_that_cannot_be_written_leaves_the_profiler_free_for_the_next(model_dir, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError("disk full")

    harness = Harness(model_dir)
    with monkeypatch.context() as patch:
        patch.setattr(profiler, "write_trace", full_disk)
        harness.send(ProfileReq("a", output_dir=str(tmp_path), activities=["CPU"]))
        harness.run(request("a", PROMPT, max_new_tokens=2))
        harness.send(ProfileReq("b", stop=True))
        harness.run()
    harness.send(ProfileReq("c", output_dir=str(tmp_path)))
    harness.run(request("c", PROMPT, max_new_tokens=2))
    harness.send(ProfileReq("d", stop=True))
    harness.run()
    assert [answer.success for answer in answers(harness)] == [True, False, True, True]
    (path,) = answers(harness)[-1].files  # the second recording asked for no torch profile and has none
    assert read_trace(Path(path))[1]["torch_profiler"] is False


def test_what_does_not_fit_is_refused(model_dir, tmp_path):
    harness = Harness(model_dir)
    blocked = tmp_path / "file"
    blocked.write_text("")
    harness.send(
        ProfileReq("a", stop=True),
        ProfileReq("b", output_dir=str(blocked)),
        ProfileReq("c", output_dir=str(tmp_path), start_step=5),
        ProfileReq("d"),
        ProfileReq("e", stop=True),
    )
    harness.run()
    told = {answer.req_id: (answer.success, answer.message) for answer in answers(harness)}
    assert told["a"] == (False, "Profiling is not in progress; call /start_profile first")
    assert not told["b"][0] and str(blocked) in told["b"][1]
    assert told["c"][0] and told["d"] == (False, "Profiling is already in progress; call /stop_profile first")
    assert told["e"] == (False, "Nothing was recorded: only 0 of 5 steps had passed")
