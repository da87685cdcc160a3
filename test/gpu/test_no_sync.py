"""Zero blocking reads per decode step on a GPU, one packed copy per step, and a host that runs ahead."""

from __future__ import annotations

import pytest
import torch

from gpu.gpu_case import build, write_config
from spec.harness import random_prompt, request

STEPS, PROFILED = 200, 50


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("models"), "slice")


@pytest.fixture
def steady(path):
    """A scheduler in the middle of decoding one request under graphs."""
    harness = build(path, width=4)
    harness.send(request("r", random_prompt(40, 1, 8192), max_new_tokens=900))
    with harness.core.runner.on_forward_stream():
        for _ in range(20):
            harness.step()
        yield harness


def test_no_step_waits_for_the_device(steady):
    before = steady.core.decode_steps
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS):
            steady.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steady.core.decode_steps == before + STEPS


def test_one_copy_per_step_and_no_synchronisation(steady):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            steady.step()
    names = [event.name for event in profiler.events()]
    copies = sum("Memcpy DtoH" in name for name in names)
    waits = [name for name in names if name in ("cudaStreamSynchronize", "cudaDeviceSynchronize")]
    assert PROFILED - 1 <= copies <= PROFILED + 1
    assert len(waits) <= 1  # the profiler's own


def test_the_host_runs_ahead(steady):
    clock = steady.core.runner.device_clock
    clock.reset()
    for _ in range(STEPS):
        steady.step()
    print(f"run-ahead {clock.run_ahead:.2f}, idle {clock.idle_share:.3f}, launch {clock.launch_us:.0f} us")
    assert clock.run_ahead > 0.9
