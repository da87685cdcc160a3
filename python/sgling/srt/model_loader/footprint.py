"""How many bytes of weights one rank will hold, from the config alone: known before anything is read."""

from __future__ import annotations

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.model_loader.inventory import expected_tensors

_REPLICATED = (
    "norm.weight",
    "o_norm.weight",
    "layernorm.weight",
    "kv_a_proj_with_mqa.weight",
    "q_a_proj.weight",
    "mlp.gate.weight",
    "mlp.gate.expert_bias",
    "eh_proj.weight",
)
_FP32 = ("conv1d.weight",)  # kept in fp32 whatever the file holds


def is_replicated(name: str) -> bool:
    """Whether every rank holds the whole tensor (docs/ling3.md §4.3); all others are cut into equal parts."""
    return name.endswith(_REPLICATED)


def rank_weight_bytes(config: ModelConfig, tp_size: int, dtype: torch.dtype, with_nextn: bool) -> int:
    """Bytes of one rank's weights in the serving dtypes."""
    total = 0
    for name, spec in expected_tensors(config, with_nextn).items():
        itemsize = 4 if spec.dtype == "F32" or name.endswith(_FP32) else dtype.itemsize
        total += spec.numel * itemsize // (1 if is_replicated(name) else tp_size)
    return total


def draft_head_bytes(tokens: int, config: ModelConfig, tp_size: int, itemsize: int) -> int:
    """Upper bound of a rank's gathered head of ``tokens`` tokens."""
    return min(tokens, config.vocab_size // tp_size) * config.hidden_size * itemsize


def packed_copy_bytes(config: ModelConfig, tp_size: int, with_nextn: bool) -> int:
    """Upper bound of what :func:`sgling_kernel.linear.pack_weight` adds on a CPU in fp32: every projection again."""
    total = 0
    for name, spec in expected_tensors(config, with_nextn).items():
        if len(spec.shape) == 2 and ".experts." not in name and "word_embeddings" not in name:
            total += spec.numel * 4 // (1 if is_replicated(name) else tp_size)
    return total
