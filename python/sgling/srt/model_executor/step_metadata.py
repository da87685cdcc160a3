"""When the metadata of a decode step is worked out: inside its graphs, in a small graph before them, or eagerly.

Every mode fills the same persistent buffers with the same operator; device steps read them through one object and do
not know the mode. The Python side remembers for how many rows they were filled last, so that a step that reads what
nobody made is an error and not a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgling.srt.core.forward_batch import ForwardMode
from sgling.srt.core.step import StepInput
from sgling.srt.core.step_metadata import StepMetadata
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling_kernel.cache_locs import fill_step_metadata


class MetadataSource:
    """In-graph metadata (the default): the first nodes of the graphs that start a step; also the base of the others.

    Attributes:
        mode: ForwardMode of the target in the steps it serves.
        columns: rows per request that a step may ask for.
    """

    name = "in_graph"

    def __init__(self, runner: ModelRunner, mode: ForwardMode, columns: Callable[[StepInput], int]):
        self.runner = runner
        self.mode = mode
        self.columns = columns
        self._buffers = StepMetadata.allocate(runner.plan.max_running_requests, runner.window, runner.device)
        self._installed: StepMetadata | None = None
        self._fills_once = self._filled = False

    @contextmanager
    def one_fill(self) -> Iterator[None]:
        """Inside, only the first :meth:`at_start` fills the buffers: for device steps of one step in one graph."""
        self._fills_once, self._filled = True, False
        try:
            yield
        finally:
            self._fills_once = False

    def before_step(self, step: StepInput, padded: bool = False) -> None:
        """Call before the first device step or graph of a step; ``padded``: some of its rows are padding."""
        self._installed = self._views(step)

    def at_start(self, step: StepInput) -> StepMetadata:
        """What draft, verify and decode read; before the step publishes new lengths."""
        if not (self._fills_once and self._filled):
            self.refill(step)
            self._filled = True
        return self._installed

    def of_step(self, step: StepInput) -> StepMetadata:
        """The same after the step has published its lengths (extend)."""
        batch, columns = len(step.req_pool_indices), self.columns(step)
        made, made_columns = (0, 0) if self._installed is None else self._installed.locs.shape
        if batch > made or columns != made_columns:
            raise RuntimeError(f"a step of {batch} x {columns} rows reads metadata made for {made} x {made_columns}")
        return self._views(step)

    def refill(self, step: StepInput) -> None:
        """Fill the buffers for a step and install them; one node on a GPU."""
        runner, views = self.runner, self._views(step)
        lengths, slots = runner.future.new_seq_lens, runner.future.state_slot
        fill_step_metadata(lengths, slots, runner.pools.req_to_token, step.req_pool_indices, views)
        self._installed = views

    def capture(self, step: StepInput) -> None:
        """Record what :meth:`before_step` will replay for steps on these very rows; nothing in this mode."""

    def reset(self) -> None:
        """Forget recorded graphs: their owner records again."""

    def _views(self, step: StepInput) -> StepMetadata:
        return self._buffers.views(len(step.req_pool_indices), self.columns(step))


class EagerMetadata(MetadataSource):
    """Metadata by eagerly launched kernels before each step."""

    name = "eager"

    def before_step(self, step: StepInput, padded: bool = False) -> None:
        """See :class:`MetadataSource`."""
        self.refill(step)

    def at_start(self, step: StepInput) -> StepMetadata:
        """See :class:`MetadataSource`."""
        return self.of_step(step)
