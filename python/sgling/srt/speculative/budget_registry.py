"""The verify budget of a resolved speculation, with the cost of rounds it weighs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sgling.srt.config.depth_table import DepthTable
from sgling.srt.config.spec_config import SpecConfig
from sgling.srt.core.step import PrefillInput, StepInput, StepOutput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import StepWorker
from sgling.srt.speculative.confidence_history import ConfidenceHistory
from sgling.srt.speculative.dspark_budget import MeasuredCost, ProfiledCost, VerifyBudget
from sgling.srt.speculative.step_costs import measure_step_costs

logger = logging.getLogger(__name__)


class WholeBudget:
    """Every row of every request: confidences are wanted, nothing is cut."""

    def rows_for(self, batch: Sequence[ConfidenceHistory], width: int) -> int:
        """See :class:`VerifyBudget`."""
        return len(batch) * width


class _ScheduledProbe:
    """A worker whose steps of width w are scheduled steps that verify w rows per request on average."""

    def __init__(self, worker: StepWorker, max_width: int):
        self._worker = worker
        self._max_width = max_width

    def prefill(self, step: PrefillInput) -> StepOutput:
        """Never measured."""
        return self._worker.prefill(step)

    def decode(self, step: StepInput) -> StepOutput:
        """The scheduled step."""
        rows = len(step.req_pool_indices) * step.width
        return self._worker.decode(step._replace(width=self._max_width, verify_rows=rows))


def measure_scheduled_costs(runner: ModelRunner, worker: StepWorker) -> DepthTable:
    """Milliseconds of a scheduled round by batch and mean rows per request, on this machine (collective)."""
    table = measure_step_costs(runner, _ScheduledProbe(worker, runner.max_width), runner.max_width)
    for batch, row in table.step_ms.items():
        logger.info("DSPARK round in ms at batch %d, 1 to %d rows per request: %s", batch, len(row),
                    ", ".join(f"{ms:.2f}" for ms in row))  # fmt: skip
    return table


def create_budget(spec: SpecConfig, runner: ModelRunner, worker: StepWorker) -> VerifyBudget | WholeBudget | None:
    """The budget of a DSPARK verify mode; None when steps are not scheduled."""
    options = spec.dspark
    if options is None or not options.scheduled:
        return None
    if options.verify_mode == "static":
        return WholeBudget()
    if options.sps_table is not None:
        cost = ProfiledCost(options.sps_table)
    else:
        cost = MeasuredCost(measure_scheduled_costs(runner, worker))
    return VerifyBudget(cost, options.temperatures, options.align)
