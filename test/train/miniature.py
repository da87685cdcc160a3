"""A miniature of the embedded model for CPU tests."""

from __future__ import annotations

import json
from pathlib import Path

from sgling.training.generator.mix import PICO_DIR

MINIATURE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_group_size": 2,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "num_experts": 16,
    "expert_swiglu_limit_list": [0, 4],
    "share_expert_swiglu_limit_list": [5, 7],
}


def write_miniature(folder: Path) -> Path:
    """Writes the miniature's config.json and returns the folder."""
    config = json.loads((PICO_DIR / "config.json").read_text(encoding="utf-8")) | MINIATURE
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
