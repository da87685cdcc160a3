"""A tiny random DSpark drafter on disk, in the public checkpoint's tensor names, to sit on the tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from model.tiny_model import random_tensor, write_tensors
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.model_loader.draft_inventory import draft_tensors


def drafter_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the tiny drafter: two dense layers, taps after a KDA, a KDA and the MLA layer, block 4."""
    config = {
        "architectures": ["LingDSparkModel"],
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_is_neox_style": True,
        "max_position_embeddings": 2048,
        "num_target_layers": 5,
        "tie_word_embeddings": False,
        "dspark_config": {
            "block_size": 4,
            "target_layer_ids": [0, 2, 3],
            "mask_token_id": 511,
            "markov_rank": 8,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    }
    nested = {key: overrides.pop(key) for key in list(overrides) if key in config["dspark_config"]}
    return {**config, **overrides, "dspark_config": {**config["dspark_config"], **nested}}


MLA = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def drafter_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random bf16 tensors; no parameter keeps a neutral value."""
    specs = draft_tensors(DSparkConfig.from_dict(config))
    tensors = {}
    for name, spec in specs.items():
        value = random_tensor(name, spec, seed)
        tensors[name] = (value * 0.1 if name.endswith("bias") else value).to(torch.bfloat16)
    return tensors


def write_tiny_drafter(path: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json and random weights, with copies of embedding and head as public exports have; the directory."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = drafter_config(**overrides)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = drafter_tensors(config, seed)
    copies = {name: torch.zeros(config["vocab_size"], config["hidden_size"]) for name in ("embed_tokens", "lm_head")}
    write_tensors(directory, {**tensors, **{f"{name}.weight": value for name, value in copies.items()}})
    return directory
