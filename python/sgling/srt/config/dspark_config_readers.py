"""Reads single settings out of a DSpark drafter's config.json; every error names key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgling.srt.config.model_config_checks import ModelConfigError, check_rope
from sgling.srt.config.model_config_readers import read_names, read_number, read_positive, read_rope_theta

MARKOV_TYPES = ("vanilla", "gated", "rnn")
_REFUSED = {  # key -> values that ask for nothing
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "draft_vocab_size": (),
    "quantization_config": (),
    "compression_config": (),
    "logits_mup_width_multiplier": (1, 1.0),
}


def read_section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object under ``key``; empty where the key is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ModelConfigError(f"config.json: {key}={value!r}: must be an object")
    return value or {}


def read_attention(raw: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the attention: with ``kv_lora_rank`` those of Ling's MLA, else of grouped-query attention."""
    for key, neutral in _REFUSED.items():
        if raw.get(key) is not None and raw[key] not in neutral:
            raise ModelConfigError(f"config.json: {key}={raw[key]!r}: not built for DSpark drafters")
    heads = read_positive(raw, "num_attention_heads")
    if raw.get("kv_lora_rank") is not None:
        if raw.get("q_lora_rank") is not None:
            raise ModelConfigError(f"config.json: q_lora_rank={raw['q_lora_rank']!r}: not built for DSpark drafters")
        names = {
            "latent": "kv_lora_rank",
            "nope": "qk_nope_head_dim",
            "rope": "qk_rope_head_dim",
            "v_dim": "v_head_dim",
        }
        return {"heads": heads, **{name: read_positive(raw, key) for name, key in names.items()}}
    kv_heads = heads if raw.get("num_key_value_heads") is None else read_positive(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise ModelConfigError(f"config.json: num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}")
    hidden = read_positive(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelConfigError(f"config.json: head_dim is missing and hidden_size={hidden} is no multiple of {heads}")
    head_dim = hidden // heads if raw.get("head_dim") is None else read_positive(raw, "head_dim")
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


def read_rope(raw: Mapping[str, Any], attention: Mapping[str, int]) -> tuple[float, int, bool]:
    """(theta, rotated dimensions, half-split pairs); scaled RoPE is refused."""
    check_rope(raw)
    if "latent" in attention:
        dim = attention["rope"]
    elif raw.get("rope_dim") is not None:
        dim = read_positive(raw, "rope_dim")
    else:
        dim = int(attention["head_dim"] * read_number(raw, "partial_rotary_factor", 1.0))
    limit = attention.get("head_dim", dim)
    if dim < 2 or dim % 2 or dim > limit:
        raise ModelConfigError(f"config.json: {dim} rotated dimensions: must be even, 2 to {limit}")
    return read_rope_theta(raw), dim, _read_neox(raw)


def _read_neox(raw: Mapping[str, Any]) -> bool:
    """Half-split pairs unless a key says interleaved; keys that disagree are an error."""
    keys = ("rope_is_neox_style", "is_neox_style")
    said = {key: read_flag(raw, key, True) for key in keys if raw.get(key) is not None}
    if raw.get("rope_interleave") is not None:
        said["rope_interleave"] = not read_flag(raw, "rope_interleave", False)
    if len(set(said.values())) > 1:
        raise ModelConfigError(f"config.json: {', '.join(said)} disagree about the RoPE style")
    return next(iter(said.values()), True)


def read_layers(raw: Mapping[str, Any], num_layers: int) -> list[tuple[bool, int | None]]:
    """(causal, window) of each layer: full attention sees its whole block, sliding attention is causal by default."""
    kinds = read_names(raw, "layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise ModelConfigError(
            f"config.json: layer_types={kinds!r}: needs {num_layers} of full_attention, sliding_attention"
        )
    explicit = None if raw.get("is_causal") is None else read_flag(raw, "is_causal", False)
    layers = []
    for kind in kinds:
        sliding = kind == "sliding_attention"
        window = read_positive(raw, "sliding_window") if sliding else None
        layers.append((sliding if explicit is None else explicit, window))
    return layers


def read_target_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Tapped target layers, strictly increasing from -1 on."""
    listed = raw.get("target_layer_ids")
    valid = isinstance(listed, list | tuple) and listed and all(type(layer) is int for layer in listed)
    if not valid or listed[0] < -1 or any(a >= b for a, b in zip(listed, listed[1:], strict=False)):
        raise ModelConfigError(
            f"config.json: target_layer_ids={listed!r}: must be layers in increasing order (-1 first)"
        )
    return tuple(listed)


def read_mask_token(raw: Mapping[str, Any]) -> int:
    """The id that fills a block, a row of the embedding."""
    mask, rows = raw.get("mask_token_id"), read_positive(raw, "vocab_size")
    if type(mask) is not int or not 0 <= mask < rows:
        raise ModelConfigError(f"config.json: mask_token_id={mask!r}: must be one of the {rows} embedding rows")
    return mask


def read_markov(raw: Mapping[str, Any]) -> tuple[int, str]:
    """(rank, head type); rank 0 means no Markov head, a rank without a type is refused."""
    rank = raw.get("markov_rank")
    if rank in (None, 0):
        return 0, "none"
    rank = read_positive(raw, "markov_rank")
    kind = raw.get("markov_head_type")
    if kind not in MARKOV_TYPES:
        raise ModelConfigError(
            f"config.json: markov_rank={rank} with markov_head_type={kind!r}: must be one of {', '.join(MARKOV_TYPES)}"
        )
    return rank, kind


def read_flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    """Boolean under ``key``, or the default where the key is absent or null."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelConfigError(f"config.json: {key}={value!r}: must be true or false")
    return value
