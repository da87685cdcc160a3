"""Step workers by algorithm name."""

from __future__ import annotations

from sgling.srt.config.spec_config import SpecConfig
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PlainWorker, StepWorker
from sgling.srt.speculative.dspark_worker import DSparkWorker
from sgling.srt.speculative.nextn_worker import NextnWorker

WORKERS: dict[str | None, type[PlainWorker]] = {None: PlainWorker, "NEXTN": NextnWorker, "DSPARK": DSparkWorker}


def create_worker(spec: SpecConfig, runner: ModelRunner) -> StepWorker:
    """The worker of a resolved algorithm (None: plain decoding)."""
    return WORKERS[spec.algorithm](runner)
