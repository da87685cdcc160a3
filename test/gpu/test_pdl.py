"""Early starts change nothing: every operator behind a late predecessor, and on a GPU with few free SMs.

Programmatic dependent launch lets a node start while the one before still runs. A kernel that reads or writes before it
waits is wrong only when the timing is bad, so the timing is made bad here: the predecessor lets the operator start at
once and writes its operands some 50 us later; until then they hold NaN or 0. The predecessor also copies what the
operator changes in place at that late moment, so that a write before the wait shows too.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu.op_cases import CASES, Case, build
from sgling_kernel import cuda, dispatch

PROBE = Path(__file__).with_name("pdl_probe.cu")
LATE_CYCLES, LIMIT_CYCLES = 100_000, 4_000_000_000  # 50 us; about two seconds
REPEATS = 50
ROWS = (1, 6)
ops = pytest.mark.parametrize("name", list(CASES))
widths = pytest.mark.parametrize("rows", ROWS)


@pytest.fixture(autouse=True)
def _switches():
    """Tests set the PDL switch; none leaves it to the next."""
    yield
    dispatch.set_kernel_switches()


def poison(x: Tensor) -> None:
    """What an operator must not see: NaN, or 0 where that is a harmless index."""
    x.fill_(torch.nan if x.is_floating_point() else 0)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bytes."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Harness:
    """A case with copies of everything it reads and changes, and its expected result without early starts."""

    def __init__(self, case: Case):
        self.case = case
        self.truth = {key: value.clone() for key, value in case.fresh.items()}
        self.before = [value.clone() for value in case.touched]
        self.shadow = [torch.empty_like(value) for value in case.touched]
        pairs = [(self.truth[key], value) for key, value in case.fresh.items()]
        pairs += list(zip(case.touched, self.shadow, strict=True))
        table = [(a.data_ptr(), b.data_ptr(), a.numel() * a.element_size() // 2) for a, b in pairs]
        assert all(a.is_contiguous() and b.is_contiguous() for a, b in pairs)
        self.table = torch.tensor(table, dtype=torch.int64, device="cuda")
        dispatch.set_kernel_switches(pdl=False)
        for _ in range(2):  # compile, and fill caches of the operator
            self.reset()
            self.expected = [out.clone() for out in case.run(self.truth)]
        self.after = [value.clone() for value in case.touched]
        torch.cuda.synchronize()
        dispatch.set_kernel_switches(pdl=True)

    def reset(self) -> None:
        """In-place operands as they were."""
        for value, original in zip(self.case.touched, self.before, strict=True):
            value.copy_(original)

    def late_operands(self) -> None:
        """Enqueue the predecessor: it lets the next node start, then writes the operands late."""
        cuda.launch(cuda.function(PROBE, "slow_copy"), self.table, len(self.table), LATE_CYCLES)

    def check(self, outputs: list[Tensor]) -> None:
        for got, want in zip(outputs, self.expected, strict=True):
            assert same(got, want)
        for got, want in zip(self.case.touched, self.after, strict=True):
            assert same(got, want)


@ops
@widths
def test_a_late_predecessor_changes_nothing(name, rows):
    harness = Harness(build(name, rows))
    case = harness.case
    harness.late_operands()
    case.run(case.fresh)  # the PDL variant of Triton kernels is compiled here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        harness.late_operands()
        outputs = case.run(case.fresh)
    for _ in range(REPEATS):
        harness.reset()
        for value in case.fresh.values():
            poison(value)
        graph.replay()
        torch.cuda.synchronize()
        harness.check(list(outputs))
        assert all(same(a, b) for a, b in zip(harness.shadow, harness.before, strict=True))


def test_the_predecessor_is_late_and_the_next_node_early():
    """Without its wait a consumer would see poison: the probe itself, used as a consumer that copies at once, does."""
    source, middle, seen = (torch.full((1 << 16,), value, device="cuda") for value in (1.0, 0.0, 0.0))
    units = source.numel() * 2
    late = torch.tensor([[source.data_ptr(), middle.data_ptr(), units]], device="cuda")
    early = torch.tensor([[middle.data_ptr(), seen.data_ptr(), units]], device="cuda")
    stale = 0
    for _ in range(20):
        middle.zero_()
        torch.cuda.synchronize()
        cuda.launch(cuda.function(PROBE, "slow_copy"), late, 1, LATE_CYCLES)
        cuda.launch(cuda.function(PROBE, "hasty_copy"), early, 1)
        torch.cuda.synchronize()
        stale += bool((seen == 0).any())
    assert stale >= 15, stale


class Occupied:
    """Context in which another stream holds ``count`` SMs."""

    def __init__(self, count: int):
        self.count = count
        self.release, self.running = (torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(2))
        self.stream = torch.cuda.Stream()

    def __enter__(self) -> None:
        shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            function = cuda.function(PROBE, "occupy")
            cuda.launch(function, self.release, self.running, self.count, shared, LIMIT_CYCLES)
        deadline = time.monotonic() + 1
        while int(self.running) < self.count and time.monotonic() < deadline:
            time.sleep(1e-4)
        assert int(self.running) == self.count

    def __exit__(self, *error: object) -> None:
        self.release.fill_(1)
        self.stream.synchronize()


@ops
@pytest.mark.parametrize("free", [3, 40])
def test_results_do_not_depend_on_how_many_sms_are_free(name, free):
    harness = Harness(build(name, 6))
    harness.case.run(harness.truth)
    total = torch.cuda.get_device_properties(0).multi_processor_count
    harness.reset()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with Occupied(total - free):
        outputs = harness.case.run(harness.truth)
        done.record()
        done.synchronize()
    harness.check(list(outputs))
