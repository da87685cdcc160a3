"""Step traces of a GPU: device times are ordered, anchored to the host clock, and graph replays have names."""

from __future__ import annotations

import time

import pytest
import torch

import sgling
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.managers.trace_points import CudaClock
from sgling.srt.observability.rounds import find_rounds, summary
from sgling.srt.observability.step_trace import DEVICE, read_trace
from spec.harness import random_prompt, request


def test_marks_follow_the_host_clock():
    clock = CudaClock()
    before = time.perf_counter_ns()
    first = clock.mark()
    torch.cuda._sleep(2_000_000)
    second = clock.mark()
    torch.cuda.synchronize()
    after = time.perf_counter_ns()
    times = [clock.nanoseconds(mark) for mark in (first, second)]
    slack = 200_000  # the anchor itself is only that exact
    assert before - slack <= times[0] < times[1] <= after + slack


@pytest.mark.parametrize(("relay", "names"), [("three", {"draft", "verify", "extend"}), ("merged", {"round"})])
def test_rounds_of_an_engine_are_named_and_not_all_idle(tmp_path, relay, names):
    model = write_tiny_checkpoint(tmp_path / "model", seed=3)
    prompt = request("a", random_prompt(12, seed=1)).input_ids
    with sgling.Engine(model_path=str(model), speculative_algorithm="NEXTN", cuda_graph_relay=relay) as engine:
        params = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.0}
        plain = engine.generate(input_ids=prompt, sampling_params=params)["output_ids"]
        engine.start_profile(output_dir=str(tmp_path))
        assert engine.generate(input_ids=prompt, sampling_params=params)["output_ids"] == plain
        spans, facts = read_trace(tmp_path / engine.stop_profile()[0])
    assert facts["device"] == "cuda"
    assert names <= {span.name for span in spans if span.lane == DEVICE}
    assert all(span.begin <= span.end for span in spans)
    assert 0 <= summary(find_rounds(spans))["device_idle"] < 1
