"""Builds the target and, when asked for, the NEXTN layer of one rank from a checkpoint directory or random weights."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple

import torch

from sgling.srt.config.load_config import LoadConfig
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.model_loader.checkpoint import stored_tensors, with_native_names
from sgling.srt.model_loader.checks import check_inventory
from sgling.srt.model_loader.dummy import DummyWeightSource
from sgling.srt.model_loader.errors import ModelLoadError
from sgling.srt.model_loader.file_source import FileWeightSource
from sgling.srt.model_loader.inventory import expected_tensors
from sgling.srt.models.bailing_moe_v3 import BailingMoeV3ForCausalLM
from sgling.srt.models.bailing_moe_v3_nextn import BailingMoeV3ForCausalLMNextN
from sgling.srt.models.registry import model_classes

logger = logging.getLogger(__name__)


class LoadReport(NamedTuple):
    """What loading did on one rank.

    Attributes:
        weight_bytes: bytes of this rank's weights in the serving dtypes.
        num_tensors: checkpoint tensors read (each whole or in part).
        ignored: names of the files that mean nothing in this config.
        seconds: wall time of the load.
    """

    weight_bytes: int
    num_tensors: int
    ignored: tuple[str, ...]
    seconds: float

    def joined(self, other: LoadReport) -> LoadReport:
        """Both loads as one: every field is a sum."""
        return LoadReport(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class LoadedModel(NamedTuple):
    """Result of :func:`get_model`."""

    target: BailingMoeV3ForCausalLM
    nextn: BailingMoeV3ForCausalLMNextN | None
    report: LoadReport


def get_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    device: str,
    with_nextn: bool,
    tap_layers: tuple[int, ...] = (),
) -> LoadedModel:
    """Load one rank's model.

    Args:
        dtype: model dtype of weights and activations; conv weights, A_log, dt_bias and expert_bias are fp32 always.
        with_nextn: also build the NEXTN layer; without it the checkpoint's NEXTN tensors are not looked at.
        tap_layers: see ``BailingMoeV3ForCausalLM``.

    Raises:
        ModelLoadError: a file or tensor is missing, damaged, of the wrong shape, or not accounted for by the config.
        ModelConfigError: the tensor-parallel size does not divide a sharded dimension.
    """
    started = time.perf_counter()
    model_config.check_tp_size(parallel.size)
    if with_nextn and not model_config.num_nextn_predict_layers:
        raise ModelLoadError("NEXTN needs a NEXTN layer, but config.json says num_nextn_predict_layers=0")
    if load_config.load_format == "dummy":
        specs = expected_tensors(model_config, with_nextn=True)
        ignored, source = (), DummyWeightSource(specs, parallel, dtype, device)
    else:
        ignored, source = _open_files(model_config, load_config, parallel, (dtype, device), with_nextn)
    classes = model_classes(model_config.architecture)
    target = classes.target(source, model_config, tap_layers)
    nextn = classes.nextn(source, model_config, target) if with_nextn else None
    report = LoadReport(source.loaded_bytes, source.loaded_tensors, ignored, time.perf_counter() - started)
    logger.info(
        "loaded %d tensors, %.1f MB on rank %d of %d in %.1f s",
        report.num_tensors, report.weight_bytes / 1e6, parallel.rank, parallel.size, report.seconds,
    )  # fmt: skip
    return LoadedModel(target, nextn, report)


def _open_files(
    model_config: ModelConfig,
    load_config: LoadConfig,
    parallel: ParallelState,
    placement: tuple[torch.dtype, str],
    with_nextn: bool,
) -> tuple[tuple[str, ...], FileWeightSource]:
    """Checked source over the checkpoint's files, and the names it leaves unread."""
    stored = with_native_names(stored_tensors(Path(load_config.model_path)), model_config)
    unused = check_inventory(stored, model_config, with_nextn)
    source = FileWeightSource(stored, parallel, *placement)
    for name, twin in unused.duplicates:
        if not source.equal(name, twin):
            raise ModelLoadError(
                f"tensor {name} in {stored[name].file} differs from {twin}, which the config says it shares"
            )
    ignored = tuple(sorted((*unused.ignored, *(name for name, _ in unused.duplicates))))
    if ignored:
        logger.warning("ignored %d tensors of the checkpoint: %s", len(ignored), ", ".join(ignored))
    return ignored, source
