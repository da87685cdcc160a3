"""Puts the attention backend that was asked for into loaded models."""

from __future__ import annotations

import torch

from sgling.srt.config.dspark_config import DenseShape
from sgling.srt.layers.attention.flashinfer import FlashInferBlockBackend, FlashInferMLABackend
from sgling.srt.models.bailing_moe_v3 import BailingMoeV3ForCausalLM
from sgling.srt.models.dspark import DSparkDrafter


def use_flashinfer(target: BailingMoeV3ForCausalLM, drafter: DSparkDrafter | None, dtype: torch.dtype) -> None:
    """FlashInfer for the target's latent attention and for a dense drafter; a latent drafter keeps its own kernel.

    Raises :class:`FlashInferMissingError` when the package is absent.
    """
    config, embedding = target.config, target.embed_tokens
    tp_size, device = embedding.parallel.size, str(embedding.weight.device)
    sizes = (config.num_attention_heads // tp_size, config.kv_lora_rank, config.qk_rope_head_dim)
    target.use_full_attention(FlashInferMLABackend(config.softmax_scale, sizes, dtype, device))
    if drafter is not None and isinstance(drafter.config.attention, DenseShape):
        drafter.use_attention(FlashInferBlockBackend(drafter.config, tp_size, dtype, device))
