"""Metadata sources by the names of ``--cuda-graph-metadata``."""

from __future__ import annotations

from collections.abc import Callable

from sgling.srt.core.forward_batch import ForwardMode
from sgling.srt.core.step import StepInput
from sgling.srt.model_executor.metadata_glue import GlueMetadata
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.model_executor.step_metadata import EagerMetadata, MetadataSource

SOURCES: dict[str, type[MetadataSource]] = {
    source.name: source for source in (MetadataSource, GlueMetadata, EagerMetadata)
}


def create_metadata(runner: ModelRunner, mode: ForwardMode, columns: Callable[[StepInput], int]) -> MetadataSource:
    """The source that the runner's arguments ask for; ``columns``: rows per request that a step may ask for."""
    return SOURCES[runner.metadata_mode](runner, mode, columns)
