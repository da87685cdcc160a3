"""What of a Bailing-V3 config.json is refused, and why: each rule is one line, each message names key and value.

A setting that would change the mathematics and is not built is an error at start-up, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SUPPORTED_ARCHITECTURES = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")
SUPPORTED_MODEL_TYPE = "bailing_hybrid"


class ModelConfigError(ValueError):
    """A config.json this engine cannot serve; the message names the key and its value."""


class _Rule(NamedTuple):
    """One key with the values that keep the built mathematics right (an absent key or null is always fine)."""

    key: str
    allowed: tuple[Any, ...]
    reason: str


_RULES = (
    _Rule("model_type", (SUPPORTED_MODEL_TYPE,), f"only model_type {SUPPORTED_MODEL_TYPE!r} is supported"),
    _Rule("use_nGPT", (False,), "nGPT normalisation is not built"),
    _Rule("up_proj_norm", (False,), "a norm on up_proj is not built"),
    _Rule("value_norm", (False,), "a norm on values is not built"),
    _Rule("use_mla_nope", (False,), "MLA without its rotary half is not built"),
    _Rule("use_kda_lora", (False,), "low-rank f and g projections are not built, only full-rank ones"),
    _Rule("no_kda_lora", (True,), "low-rank f and g projections are not built, only full-rank ones"),
    _Rule("kda_safe_gate", (True,), "only the bounded KDA decay gate is built"),
    _Rule("linear_silu", (True,), "the KDA short convolution always ends in SiLU"),
    _Rule("score_function", ("sigmoid",), "only sigmoid expert scoring is built"),
    _Rule("scoring_func", ("sigmoid",), "only sigmoid expert scoring is built"),
    _Rule("topk_method", ("noaux_tc",), "only group-limited top-k with a selection bias is built"),
    _Rule("moe_router_enable_expert_bias", (True,), "a router without expert_bias is not built"),
    _Rule("scale_router_input", (False,), "scaled router inputs are not built"),
    _Rule("router_dtype", ("fp32", "float32"), "router logits are always fp32"),
    _Rule("mtp_use_kda", (False,), "a NEXTN layer with KDA is not built, only gated MLA"),
    _Rule("hidden_act", ("silu",), "only SiLU is built"),
    _Rule("use_bias", (False,), "linear biases are not built"),
    _Rule("use_qkv_bias", (False,), "linear biases are not built"),
    _Rule("attention_bias", (False,), "linear biases are not built"),
    _Rule("rope_interleave", (True,), "only the interleaved pair layout of RoPE is built"),
    _Rule("gated_attention_proj_granularity_type", ("head_wise",), "only one MLA output gate per head is built"),
    _Rule("short_conv_kernel_size", (4,), "the KDA short convolution is built for width 4"),
)


def check_supported(raw: Mapping[str, Any]) -> None:
    """Refuse a config whose mathematics is not built.

    Args:
        raw: config.json as a mapping, native names (see ``model_config.native_names``).

    Raises:
        ModelConfigError: naming the first offending key, its value and the reason.
    """
    _check_architecture(raw)
    _check_quantization(raw)
    for rule in _RULES:
        value = raw.get(rule.key)
        if value is not None and value not in rule.allowed:
            raise ModelConfigError(f"config.json: {rule.key}={value!r}: {rule.reason}")
    check_rope(raw)


def _check_architecture(raw: Mapping[str, Any]) -> None:
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelConfigError(f"config.json: architectures={names!r}: must be a list of names")
    if not names and raw.get("model_type") is None:
        raise ModelConfigError("config.json: neither 'architectures' nor 'model_type' is given")
    for name in names or ():
        if name not in SUPPORTED_ARCHITECTURES:
            supported = ", ".join(SUPPORTED_ARCHITECTURES)
            raise ModelConfigError(f"config.json: architectures={names!r}: supported are {supported}")


def _check_quantization(raw: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        value = raw.get(key)
        if value is not None:
            method = value.get("quant_method") if isinstance(value, Mapping) else value
            raise ModelConfigError(
                f"config.json: {key} with quant_method={method!r}: quantised checkpoints are not supported; "
                "supported weight formats are plain BF16, F16 and F32 safetensors"
            )


def check_rope(raw: Mapping[str, Any]) -> None:
    """Refuse scaled RoPE (of a target or of a drafter)."""
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if value is None:
            continue
        kind = value.get("rope_type", value.get("type", "default")) if isinstance(value, Mapping) else value
        if kind != "default":
            raise ModelConfigError(
                f"config.json: {key}={value!r}: scaled RoPE (YaRN and others) is not built; "
                "the context is limited to max_position_embeddings"
            )
