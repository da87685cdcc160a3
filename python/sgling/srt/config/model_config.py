"""Shape and constants of a Bailing-V3 model (Ling-3.0-flash, -tiny, ling3-pico), read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgling.srt.config.model_config_checks import ModelConfigError, check_supported
from sgling.srt.config.model_config_readers import (
    merge_overrides,
    native_names,
    read_above_zero,
    read_dtype,
    read_eos_ids,
    read_first_k_dense,
    read_json,
    read_layer_count,
    read_layer_types,
    read_limits,
    read_nextn_layers,
    read_number,
    read_positive,
    read_rope_theta,
    read_shared_width,
)

_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of generation_config.json; None where the file says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def values(self) -> dict[str, float]:
        """What the file says, in the words of requests: its ``top_k`` 0 means off."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        return {**found, "top_k": -1} if found.get("top_k") == 0 else found


@dataclass(frozen=True)
class ModelConfig:
    """One Bailing-V3 model: sizes as in config.json (native names), plus what follows from them.

    Attributes:
        architecture: class name of config.json.
        head_dim: KDA key dim = value dim.
        layer_types: "kda" or "mla" for each trunk layer; the NEXTN layer is always MLA.
        first_k_dense_replace: leading layers with a dense FFN; all later ones and the NEXTN layer are MoE.
        moe_shared_expert_intermediate_size: width of all shared experts together.
        routed_swiglu_limits, shared_swiglu_limits: clamp of each trunk layer, None = no clamp (NEXTN never clamps).
        max_position_embeddings: context length the position encoding was trained for, tokens.
        num_nextn_predict_layers: 0 or 1; the NEXTN layer has index ``num_hidden_layers``.
        dtype: number format the checkpoint says it is in; the serving dtype is the server's choice.
        eos_token_ids: ids of config.json, then further ones of generation_config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    first_k_dense_replace: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    routed_swiglu_limits: tuple[float | None, ...]
    shared_swiglu_limits: tuple[float | None, ...]
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rms_norm_eps: float
    kda_lower_bound: float
    short_conv_kernel_size: int
    max_position_embeddings: int
    num_nextn_predict_layers: int
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    generation: GenerationDefaults

    @classmethod
    def from_dir(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read ``config.json`` and, where present, ``generation_config.json`` of a checkpoint directory.

        Args:
            path: checkpoint directory.
            overrides: keys that replace those of config.json (``--json-model-override-args``).

        Raises:
            ModelConfigError: config.json is absent, no JSON object, or not supported.
        """
        directory = Path(path)
        raw = read_json(directory / "config.json")
        generation_file = directory / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else None
        return cls.from_dict(merge_overrides(raw, overrides or {}), generation)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Build from the contents of config.json and generation_config.json.

        Raises:
            ModelConfigError: a key is missing, out of range, or asks for mathematics that is not built.
        """
        raw = native_names(config)
        check_supported(raw)
        num_layers = read_layer_count(raw)
        model = cls(
            architecture=(raw.get("architectures") or ("BailingMoeV3ForCausalLM",))[0],
            num_hidden_layers=num_layers,
            layer_types=read_layer_types(raw, num_layers),
            first_k_dense_replace=read_first_k_dense(raw, num_layers),
            norm_topk_prob=bool(raw.get("norm_topk_prob", True)),
            moe_shared_expert_intermediate_size=read_shared_width(raw),
            routed_swiglu_limits=read_limits(raw, "expert_swiglu_limit_list", num_layers),
            shared_swiglu_limits=read_limits(raw, "share_expert_swiglu_limit_list", num_layers),
            q_lora_rank=None if raw.get("q_lora_rank") is None else read_positive(raw, "q_lora_rank"),
            rope_theta=read_rope_theta(raw),
            routed_scaling_factor=read_number(raw, "routed_scaling_factor", 1.0),
            rms_norm_eps=read_above_zero(raw, "rms_norm_eps", 1e-6),
            kda_lower_bound=read_number(raw, "kda_lower_bound", -5.0),
            short_conv_kernel_size=raw.get("short_conv_kernel_size") or 4,
            num_nextn_predict_layers=read_nextn_layers(raw),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            dtype=read_dtype(raw),
            eos_token_ids=read_eos_ids(raw, generation or {}),
            pad_token_id=raw.get("pad_token_id"),
            generation=GenerationDefaults(**{k: (generation or {}).get(k) for k in _GENERATION_KEYS}),
            **{key: read_positive(raw, key) for key in _SIZES},
        )
        _check_consistent(model, raw)
        return model

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA query or key in the expanded form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of MLA scores (no mscale: RoPE is never scaled here)."""
        return self.qk_head_dim**-0.5

    @property
    def kv_row_dim(self) -> int:
        """Values one token keeps per MLA layer: latent, then the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def context_length(self) -> int:
        """Longest sequence the position encoding covers, tokens."""
        return self.max_position_embeddings

    @property
    def kda_layer_ids(self) -> tuple[int, ...]:
        """Trunk layers with KDA attention, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "kda")

    @property
    def mla_layer_ids(self) -> tuple[int, ...]:
        """Trunk layers with MLA attention, ascending (the NEXTN layer is not among them)."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "mla")

    @property
    def nextn_layer_id(self) -> int:
        """Index of the NEXTN layer in tensor names and in the draft KV pool."""
        return self.num_hidden_layers

    def is_mla(self, layer: int) -> bool:
        """Whether a layer's attention is MLA (true of the NEXTN layer)."""
        return layer >= self.num_hidden_layers or self.layer_types[layer] == "mla"

    def is_moe(self, layer: int) -> bool:
        """Whether a layer's FFN is a mixture of experts (true of the NEXTN layer)."""
        return layer >= self.first_k_dense_replace

    def routed_limit(self, layer: int) -> float | None:
        """SwiGLU clamp of the routed experts of a layer, None = no clamp."""
        return self.routed_swiglu_limits[layer] if layer < self.num_hidden_layers else None

    def shared_limit(self, layer: int) -> float | None:
        """SwiGLU clamp of the shared expert of a layer, None = no clamp."""
        return self.shared_swiglu_limits[layer] if layer < self.num_hidden_layers else None

    def check_tp_size(self, tp_size: int) -> None:
        """Refuse a tensor-parallel size that does not divide every sharded dimension.

        Raises:
            ModelConfigError: naming the dimension.
        """
        for key in _SHARDED_SIZES:
            size = getattr(self, key)
            if size % tp_size:
                raise ModelConfigError(f"config.json: {key}={size} cannot be split over tp_size={tp_size}")


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "moe_intermediate_size",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)
_SHARDED_SIZES = (
    "vocab_size",
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
)


def _check_consistent(model: ModelConfig, raw: Mapping[str, Any]) -> None:
    """Relations between keys that the layers rely on."""
    heads = model.num_attention_heads
    for key in ("num_key_value_heads", "num_kv_heads_for_linear_attn", "linear_num_heads"):
        if raw.get(key) not in (None, 0, heads):
            raise ModelConfigError(f"config.json: {key}={raw[key]!r}: must equal num_attention_heads={heads}")
    per_group, rest = divmod(model.num_experts, model.n_group)
    if rest or per_group < 2:
        raise ModelConfigError(
            f"config.json: n_group={model.n_group}: must split num_experts={model.num_experts} into groups of 2 or more"
        )
    if model.topk_group > model.n_group:
        raise ModelConfigError(f"config.json: topk_group={model.topk_group}: exceeds n_group={model.n_group}")
    if model.num_experts_per_tok > model.topk_group * per_group:
        raise ModelConfigError(
            f"config.json: num_experts_per_tok={model.num_experts_per_tok}: exceeds the "
            f"{model.topk_group * per_group} experts of topk_group={model.topk_group} groups"
        )
    if model.qk_rope_head_dim % 2:
        raise ModelConfigError(f"config.json: qk_rope_head_dim={model.qk_rope_head_dim}: must be even")
    if model.kda_lower_bound >= 0:
        raise ModelConfigError(f"config.json: kda_lower_bound={model.kda_lower_bound}: must be negative")
