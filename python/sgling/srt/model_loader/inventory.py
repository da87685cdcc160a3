"""The exact tensor list of a Bailing-V3 checkpoint, from its config alone (docs/ling3.md §2).

The sums are known to the last digit: 127,486,405,600 values for flash with its NEXTN layer (165,472 of them F32) and
7,893,392,800 for tiny.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sgling.srt.config.model_config import ModelConfig


class TensorSpec(NamedTuple):
    """What a checkpoint holds under one name.

    Attributes:
        shape: as stored, linear weights are [out, in].
        dtype: as published, "BF16" or "F32"; files may hold any of BF16, F16 and F32.
    """

    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def expected_tensors(config: ModelConfig, with_nextn: bool) -> dict[str, TensorSpec]:
    """Name -> spec of every tensor the trunk needs, plus those of the NEXTN layer when it is asked for."""
    hidden, vocab = config.hidden_size, config.vocab_size
    specs = {"model.word_embeddings.weight": TensorSpec((vocab, hidden)), "model.norm.weight": TensorSpec((hidden,))}
    if not config.tie_word_embeddings:
        specs["lm_head.weight"] = TensorSpec((vocab, hidden))
    for layer in range(config.num_hidden_layers):
        specs.update(layer_tensors(config, layer))
    if with_nextn:
        specs.update(layer_tensors(config, config.nextn_layer_id))
        specs.update(_nextn_extras(config))
    return specs


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """Norms, attention and FFN of one layer, under full names."""
    prefix = f"model.layers.{layer}"
    attention = _mla(config) if config.is_mla(layer) else _kda(config)
    ffn = _moe(config) if config.is_moe(layer) else ffn_tensors("", config.hidden_size, config.intermediate_size)
    norm = TensorSpec((config.hidden_size,))
    specs = {f"{prefix}.input_layernorm.weight": norm, f"{prefix}.post_attention_layernorm.weight": norm}
    specs.update({f"{prefix}.attention.{leaf}": spec for leaf, spec in attention.items()})
    specs.update({f"{prefix}.mlp.{leaf}": spec for leaf, spec in ffn.items()})
    return specs


def _nextn_extras(config: ModelConfig) -> dict[str, TensorSpec]:
    prefix, hidden = f"model.layers.{config.nextn_layer_id}", config.hidden_size
    specs = {f"{prefix}.{leaf}.weight": TensorSpec((hidden,)) for leaf in ("enorm", "hnorm", "final_layernorm")}
    return {**specs, f"{prefix}.eh_proj.weight": TensorSpec((hidden, 2 * hidden))}


def _kda(config: ModelConfig) -> dict[str, TensorSpec]:
    hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    width = heads * dim
    specs = {f"{leaf}_proj.weight": TensorSpec((width, hidden)) for leaf in "qkvfg"}
    specs |= {f"{leaf}_conv1d.weight": TensorSpec((width, 1, config.short_conv_kernel_size)) for leaf in "qkv"}
    return specs | {
        "b_proj.weight": TensorSpec((heads, hidden)),
        "A_log": TensorSpec((heads,), "F32"),
        "dt_bias": TensorSpec((width,), "F32"),
        "o_norm.weight": TensorSpec((dim,)),
        "o_proj.weight": TensorSpec((hidden, width)),
    }


def _mla(config: ModelConfig) -> dict[str, TensorSpec]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries, rank = heads * config.qk_head_dim, config.q_lora_rank
    if rank is None:
        specs = {"q_proj.weight": TensorSpec((queries, hidden))}
    else:
        specs = {
            "q_a_proj.weight": TensorSpec((rank, hidden)),
            "q_a_layernorm.weight": TensorSpec((rank,)),
            "q_b_proj.weight": TensorSpec((queries, rank)),
        }
    return specs | {
        "kv_a_proj_with_mqa.weight": TensorSpec((config.kv_row_dim, hidden)),
        "kv_a_layernorm.weight": TensorSpec((latent,)),
        "kv_b_proj.weight": TensorSpec((heads * (config.qk_nope_head_dim + config.v_head_dim), latent)),
        "g_proj.weight": TensorSpec((heads, hidden)),
        "dense.weight": TensorSpec((hidden, heads * config.v_head_dim)),
    }


def ffn_tensors(prefix: str, hidden: int, width: int) -> dict[str, TensorSpec]:
    """A SwiGLU FFN under ``prefix``."""
    return {
        f"{prefix}gate_proj.weight": TensorSpec((width, hidden)),
        f"{prefix}up_proj.weight": TensorSpec((width, hidden)),
        f"{prefix}down_proj.weight": TensorSpec((hidden, width)),
    }


def _moe(config: ModelConfig) -> dict[str, TensorSpec]:
    hidden = config.hidden_size
    specs = {
        "gate.weight": TensorSpec((config.num_experts, hidden)),
        "gate.expert_bias": TensorSpec((config.num_experts,), "F32"),
        **ffn_tensors("shared_experts.", hidden, config.moe_shared_expert_intermediate_size),
    }
    for expert in range(config.num_experts):
        specs.update(ffn_tensors(f"experts.{expert}.", hidden, config.moe_intermediate_size))
    return specs
