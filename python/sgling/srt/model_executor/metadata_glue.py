"""Metadata in a graph of its own, replayed before the step's graphs (``SGLANG_ENABLE_METADATA_GLUE_GRAPH=1``).

Safe by four mechanisms: warm-ups before the recording; the Python-side metadata object is kept with the graph and
installed again at each replay; a failed recording means eager metadata from then on, said once; and a guard that says
for which steps a replay is right. Attention backends have no metadata of their own to restore: theirs are views made
from the batch, and a backend that plans on the host is never captured (``why_not_captured``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling.srt.core.forward_batch import ForwardMode
from sgling.srt.core.step import StepInput
from sgling.srt.core.step_metadata import StepMetadata
from sgling.srt.model_executor.graph_capture import record
from sgling.srt.model_executor.step_metadata import EagerMetadata
from sgling_kernel.dispatch import usable


class GlueKey(NamedTuple):
    """What a glue graph was recorded for."""

    batch: int
    columns: int
    mode: ForwardMode


class GlueGraph(NamedTuple):
    """A recorded refill: the graph, the row tensor it reads and the metadata object it fills."""

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    snapshot: StepMetadata


class GlueMetadata(EagerMetadata):
    """Replays a refill where one was recorded for exactly these rows, else refills eagerly."""

    name = "glue"

    def __init__(self, *args):
        super().__init__(*args)
        self._graphs: dict[GlueKey, GlueGraph] = {}
        self._broken: str | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pool: tuple[int, int] | None = None

    def before_step(self, step: StepInput, padded: bool = False) -> None:
        """See :class:`sgling.srt.model_executor.step_metadata.MetadataSource`."""
        if self.why_not(step, padded) is not None:
            self.refill(step)
            return
        recorded = self._graphs[self._key(step)]
        recorded.graph.replay()
        self._installed = recorded.snapshot

    def why_not(self, step: StepInput, padded: bool) -> str | None:
        """Reason why a step's metadata are refilled eagerly, or None."""
        if self._broken is not None:
            return self._broken
        if padded:
            return "the batch is smaller than its bucket"
        recorded = self._graphs.get(self._key(step))
        if recorded is None:
            return "nothing is recorded for this batch and width"
        if recorded.rows.data_ptr() != step.req_pool_indices.data_ptr():
            return "the step does not run on the rows that were recorded"
        return None

    def capture(self, step: StepInput) -> None:
        """Record the refill of a step on these rows; a failure is final for this object and is said once."""
        key = self._key(step)
        if self._broken is not None or key in self._graphs:
            return
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        try:
            graph = record(lambda: self.refill(step), self._stream, self._pool, error_mode="thread_local")
        except RuntimeError as error:
            self._graphs.clear()
            self._broken = f"recording failed: {error}"
            usable("metadata glue graph", self._broken)
            return
        self._graphs[key] = GlueGraph(graph, step.req_pool_indices, self._views(step))

    def reset(self) -> None:
        """See :class:`sgling.srt.model_executor.step_metadata.MetadataSource`."""
        self._graphs.clear()

    def _key(self, step: StepInput) -> GlueKey:
        return GlueKey(len(step.req_pool_indices), self.columns(step), self.mode)
