"""The depth policy of a resolved speculation."""

from __future__ import annotations

import logging

from sgling.srt.config.spec_config import SpecConfig
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import StepWorker
from sgling.srt.speculative.budget_registry import measure_scheduled_costs
from sgling.srt.speculative.confidence_depth import ConfidenceDepth
from sgling.srt.speculative.depth import AutoDepth, DepthPolicy, FixedDepth
from sgling.srt.speculative.step_costs import measure_step_costs

logger = logging.getLogger(__name__)


def create_depth_policy(spec: SpecConfig, runner: ModelRunner, worker: StepWorker) -> DepthPolicy:
    """Fixed width, or a choice with the flags' table or one measured now (collective under tensor parallelism)."""
    if spec.depth == "fixed":
        return FixedDepth(spec.width)
    if spec.depth == "confidence":
        table = spec.depth_table or measure_scheduled_costs(runner, worker)
        return ConfidenceDepth(spec.width, table, spec.dspark.temperatures)
    table = spec.depth_table or measure_step_costs(runner, worker, spec.width)
    shown = ", ".join(f"{width}: {ms:.2f}" for width, ms in enumerate(table.row(1)[: spec.width], 1))
    logger.info("Speculative depth auto: step time in ms by width: %s (%s)", shown, table.source)
    return AutoDepth(spec.width, table)
