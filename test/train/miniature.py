"""A miniature of the embedded model for CPU tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.training.export import write_checkpoint
from sgling.training.generator.mix import PICO_DIR
from sgling.training.model import Pico

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


def write_target(folder: Path, seed: int = 0) -> Path:
    """A whole miniature target with random weights, tokenizer and template; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_miniature(folder)
    torch.manual_seed(seed)
    model = Pico(ModelConfig.from_dir(folder))
    write_checkpoint(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(PICO_DIR / name, folder / name)
    return folder
