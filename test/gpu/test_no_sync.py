"""Zero blocking reads per decode step on a GPU, one packed copy per step, and a host that runs ahead.

For plain decoding, NEXTN and DSPARK, the greedy and the masked variant, every metadata mode and both relays, at the
published depth: a step of a few layers is over before the host has planned the next one.
"""

from __future__ import annotations

import time

import pytest
import torch

from gpu.gpu_case import PLAIN, Bed, Setup
from spec.harness import Harness, random_prompt, request

WARM, STEPS, PROFILED = 20, 200, 50
MASKED = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4, "logit_bias": {7: 1.0}, "min_new_tokens": 900}
GRAPHED = PLAIN._replace(graphs=True)
CASES = {
    "plain": (GRAPHED, {}),
    "plain masked glue": (GRAPHED._replace(metadata="glue"), MASKED),
    "plain eager metadata": (GRAPHED._replace(metadata="eager"), {}),
    "nextn": (Setup(), {}),
    "nextn masked": (Setup(), MASKED),
    "nextn three glue": (Setup(relay="three", metadata="glue"), {}),
    "nextn eager metadata masked": (Setup(relay="three", metadata="eager"), MASKED),
    "nextn glue": (Setup(metadata="glue"), {"temperature": 0.7, "top_k": 40}),
    "dspark": (Setup("DSPARK", 5), {}),
    "dspark masked glue": (Setup("DSPARK", 5, metadata="glue"), MASKED),
    "dspark three eager metadata": (Setup("DSPARK", 5, metadata="eager", relay="three"), {}),
}


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    return Bed("deep", tmp_path_factory.mktemp("models"), "cuda")


@pytest.fixture(scope="module", params=CASES)
def steady(bed, request):
    """A scheduler in the middle of decoding one request under graphs."""
    setup, params = CASES[request.param]
    harness = bed.harness(setup)
    harness.send(long_request(params, bed.vocab))
    with harness.core.runner.on_forward_stream():
        for _ in range(WARM):
            harness.step()
        yield harness


def long_request(params: dict, vocab: int):
    return request("r", random_prompt(40, 1, vocab), max_new_tokens=1300, **params)


def run(harness: Harness, steps: int) -> None:
    """So many decode steps, all of them replays."""
    core = harness.core
    before, eager = core.decode_steps, core.decode_steps_eager
    for _ in range(steps):
        harness.step()
    assert core.decode_steps == before + steps and core.decode_steps_eager == eager


def test_no_step_waits_for_the_device(steady):
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(steady, STEPS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_copy_per_step_and_no_synchronisation(steady):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run(steady, PROFILED)
    names = [event.name for event in profiler.events()]
    copies = sum("Memcpy DtoH" in name for name in names)
    waits = [name for name in names if name in ("cudaStreamSynchronize", "cudaDeviceSynchronize")]
    assert PROFILED - 1 <= copies <= PROFILED + 1, f"{copies} copies to the host in {PROFILED} steps"
    assert len(waits) <= 1, f"{waits}, of which one is the profiler's own"


def test_the_host_runs_ahead(steady, request):
    clock = steady.core.runner.device_clock
    clock.reset()
    began = time.perf_counter()
    run(steady, STEPS)
    step_ms, busy_ms = (1e3 * (time.perf_counter() - began) / STEPS, clock.busy_ms / STEPS)
    seen = (
        f"{request.node.callspec.id}: run-ahead {clock.run_ahead:.2f}, idle {clock.idle_share:.3f}, "
        f"launch {clock.launch_us:.0f} us, step {step_ms:.3f} ms, device {busy_ms:.3f} ms"
    )
    print(seen)
    assert clock.run_ahead > 0.9, seen


def test_the_instrument_finds_a_blocking_read(steady):
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            steady.core.runner.future.new_seq_lens[1].item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
