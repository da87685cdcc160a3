"""Records one CUDA graph: warm-ups first, so that nothing is compiled or tuned while the device is recording."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

WARM_UPS = 2


def record(
    function: Callable[[], object], stream: torch.cuda.Stream, pool: tuple[int, int], error_mode: str = "global"
) -> torch.cuda.CUDAGraph:
    """A graph of what ``function`` enqueues.

    Args:
        function: called ``WARM_UPS`` times eagerly and once under capture; it must be replayable.
        stream: recorded on this stream, behind what the current one holds.
        pool: memory pool of the graph's temporaries.
        error_mode: which other threads' CUDA calls make the capture fail ("global", "thread_local").

    Raises:
        RuntimeError: the capture failed; the stream is usable again.
    """
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
        torch.cuda.synchronize()
        graph.capture_begin(pool=pool, capture_error_mode=error_mode)
        try:
            function()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # an invalidated capture reports itself again when it ends
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
