"""Device time of operators on a GPU, for benchmarks and tuning scripts: one ruler for all of them."""

import statistics
from collections.abc import Callable

import torch

COPY_BYTES, COPIES = 2**30, 20


def device_ms(run: Callable[[], object]) -> float:
    """Milliseconds between two events around what ``run`` enqueues; waits for the second."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def graph_us(run: Callable[[], object], replays: int, groups: int) -> float:
    """Microseconds of one replay of what ``run`` enqueues: captured once, median over groups of ``replays``.

    ``run`` is called eagerly first, which compiles what is compiled at the first call; one replay is not timed.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()

    def group() -> None:
        for _ in range(replays):
            graph.replay()

    return statistics.median(device_ms(group) for _ in range(groups)) * 1e3 / replays


def copy_gbps() -> float:
    """GB/s of a large device-to-device copy, bytes read plus bytes written."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda") for _ in range(2))
    ms = statistics.median(device_ms(lambda: target.copy_(source)) for _ in range(COPIES))
    return 2 * source.nbytes / ms / 1e6
