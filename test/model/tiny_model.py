"""A tiny random Ling-3.0-shaped checkpoint on disk, for tests: every kind of layer, clamps that bind, a NEXTN layer.

Five layers in groups of four: KDA at 0 to 2, MLA at 3 and (incomplete last group) 4; layer 0 dense, the rest 8 experts
in 4 groups. No tokenizer; ids are below 512.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.model_loader.inventory import TensorSpec, expected_tensors

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the tiny model in native spelling, with some keys replaced."""
    config = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "layer_group_size": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_kv_heads_for_linear_attn": 0,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "intermediate_size": 96,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 6000000.0,
        "rope_interleave": True,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "expert_swiglu_limit_list": [0, 0, 0, 0.4, 0.4],
        "share_expert_swiglu_limit_list": [0, 0, 0.5, 0.5, 0.7],
        "num_nextn_predict_layers": 1,
        "mtp_use_kda": False,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "gated_attention_proj_granularity_type": "head_wise",
        "use_mla_nope": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    return {**config, **overrides}


def random_tensor(name: str, spec: TensorSpec, seed: int) -> torch.Tensor:
    """fp32 values that leave no parameter at a neutral default: norms 0.5 to 1.5, expert_bias N(0, 0.1)."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    if name.endswith("expert_bias"):
        return torch.randn(spec.shape, generator=generator) * 0.1
    if name.endswith("norm.weight"):
        return torch.rand(spec.shape, generator=generator) + 0.5
    if name.endswith(("A_log", "dt_bias")):
        return torch.rand(spec.shape, generator=generator) * 2 - 1
    scale = 1.0 if name.endswith(("word_embeddings.weight", "gate.weight")) else spec.shape[-1] ** -0.5
    return torch.randn(spec.shape, generator=generator) * scale


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, NEXTN layer included when the config has one, in the published dtypes."""
    model_config = ModelConfig.from_dict(config)
    specs = expected_tensors(model_config, with_nextn=bool(model_config.num_nextn_predict_layers))
    return {name: random_tensor(name, spec, seed).to(_TORCH_DTYPES[spec.dtype]) for name, spec in specs.items()}


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """Save as one model.safetensors, or as several shards with an index."""
    directory = Path(path)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tiny_checkpoint(path: str | Path, seed: int = 0, num_shards: int = 1, **overrides: Any) -> Path:
    """Write config.json, generation_config.json and random weights; returns the directory.

    Args:
        path: directory, created if absent.
        seed: another seed gives other weights.
        num_shards: 1 writes model.safetensors, more write shards and an index.
        overrides: keys of config.json to replace, for example ``q_lora_rank=24`` or ``num_nextn_predict_layers=0``.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.6}))
    write_tensors(directory, random_tensors(config, seed), num_shards)
    return directory
