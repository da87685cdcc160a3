"""Builds one rank's DSpark drafter on top of a loaded target, from a checkpoint directory or random weights."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.load_config import LoadConfig
from sgling.srt.model_loader.checkpoint import stored_tensors
from sgling.srt.model_loader.draft_inventory import check_draft_inventory, draft_tensors
from sgling.srt.model_loader.dummy import DummyWeightSource
from sgling.srt.model_loader.file_source import FileWeightSource
from sgling.srt.model_loader.loader import LoadReport
from sgling.srt.models.bailing_moe_v3 import BailingMoeV3ForCausalLM
from sgling.srt.models.dspark import DSparkDrafter

logger = logging.getLogger(__name__)


def get_drafter(
    config: DSparkConfig, load_config: LoadConfig, target: BailingMoeV3ForCausalLM
) -> tuple[DSparkDrafter, LoadReport]:
    """Load one rank's drafter in the target's dtype, on its device and over its ranks.

    Raises:
        ModelConfigError: the drafter does not fit the target.
        ModelLoadError: a file or tensor is missing, damaged, of the wrong shape, or not accounted for by the config.
    """
    started = time.perf_counter()
    embedding = target.embed_tokens
    config.check_target(target.config, embedding.parallel.size)
    placement = (embedding.parallel, embedding.weight.dtype, str(embedding.weight.device))
    if load_config.load_format == "dummy":
        ignored, source = (), DummyWeightSource(draft_tensors(config), *placement)
    else:
        stored, ignored = check_draft_inventory(stored_tensors(Path(load_config.model_path)), config)
        source = FileWeightSource(stored, *placement)
    drafter = DSparkDrafter(source, config, target)
    trained, served = config.max_position_embeddings, target.config.max_position_embeddings
    if trained < served:
        logger.warning("drafter trained for %d of the target's %d positions: later drafts get worse", trained, served)
    report = LoadReport(source.loaded_bytes, source.loaded_tensors, ignored, time.perf_counter() - started)
    logger.info(
        "loaded the %s drafter: block %d, %d layers, %.1f MB in %.1f s; ignored: %s",
        config.architecture, config.block_size, config.num_hidden_layers, report.weight_bytes / 1e6, report.seconds,
        ", ".join(ignored) or "nothing",
    )  # fmt: skip
    return drafter, report
