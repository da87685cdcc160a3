"""Reads single settings out of a Bailing-V3 config.json, in either of its two spellings.

The native spelling and the one transformers writes are accepted. In the latter ``head_dim`` is the rope dimension and
``linear_head_dim`` the KDA one; ``num_experts_per_token``, ``num_expert_group``, ``moe_renormalize`` and
``model_max_length`` stand for ``num_experts_per_tok``, ``n_group``, ``norm_topk_prob`` and
``max_position_embeddings``; ``layer_types`` and ``mlp_layer_types`` are explicit lists. ``rotary_dim`` and
``partial_rotary_factor`` are decoys in both: all ``qk_rope_head_dim`` dimensions rotate.

Every reader raises :class:`ModelConfigError` naming key and value when the value makes no sense.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgling.srt.config.model_config_checks import ModelConfigError

MOST_LAYERS = 10_000
LARGEST_NUMBER = 1e30  # far from infinite in fp32
_TRANSFORMERS_NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
    "num_local_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "torch_dtype": "dtype",
}


def native_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of config.json under native names.

    A transformers name wins over the native one: only for ``head_dim`` are both written with different values, and
    there the transformers key (``linear_head_dim``) is the true KDA width.
    """
    raw = dict(config)
    for theirs, ours in _TRANSFORMERS_NAMES.items():
        if raw.get(theirs) is not None:
            raw[ours] = raw[theirs]
    return raw


def merge_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with overrides on top; an override in one spelling also replaces the other spelling's key."""
    twins = {**_TRANSFORMERS_NAMES, **{ours: theirs for theirs, ours in _TRANSFORMERS_NAMES.items()}}
    hidden = {twins[key] for key in overrides if key in twins}
    return {**{key: value for key, value in raw.items() if key not in hidden}, **overrides}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold one object."""
    if not path.is_file():
        raise ModelConfigError(f"{path}: file not found")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path}: must hold a JSON object, holds {type(content).__name__}")
    return content


def read_layer_types(raw: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Attention kind of each layer: an explicit list, else the group rule (incomplete last group: all MLA)."""
    listed = read_names(raw, "layer_types")
    if listed is not None:
        kinds = {"linear_attention": "kda", "full_attention": "mla"}
        if len(listed) != num_layers or any(kind not in kinds for kind in listed):
            raise ModelConfigError(
                f"config.json: layer_types={listed!r}: needs {num_layers} entries out of {tuple(kinds)}"
            )
        return tuple(kinds[kind] for kind in listed)
    group = read_positive(raw, "layer_group_size")
    tail = num_layers // group * group
    return tuple("mla" if (i + 1) % group == 0 or i >= tail else "kda" for i in range(num_layers))


def read_first_k_dense(raw: Mapping[str, Any], num_layers: int) -> int:
    """Number of leading layers with a dense FFN, from the count or from an explicit list."""
    listed = read_names(raw, "mlp_layer_types")
    if listed is None:
        count = raw.get("first_k_dense_replace", 0)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= num_layers:
            raise ModelConfigError(f"config.json: first_k_dense_replace={count!r}: must lie in 0..{num_layers}")
        return count
    count = listed.count("dense")
    if listed != ["dense"] * count + ["sparse"] * (num_layers - count):
        raise ModelConfigError(f"config.json: mlp_layer_types={listed!r}: dense layers must precede all sparse ones")
    return count


def read_shared_width(raw: Mapping[str, Any]) -> int:
    """Width of all shared experts together; transformers has no key for one and uses the routed width."""
    each = "moe_shared_expert_intermediate_size"
    width = read_positive(raw, each if raw.get(each) is not None else "moe_intermediate_size")
    return width * read_positive(raw, "num_shared_experts")


def read_limits(raw: Mapping[str, Any], key: str, num_layers: int) -> tuple[float | None, ...]:
    """Clamp of each layer out of a list where 0 means none; an absent list means no clamp anywhere."""
    listed = raw.get(key)
    if listed is None:
        return (None,) * num_layers
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        raise ModelConfigError(f"config.json: {key}={listed!r}: needs num_hidden_layers={num_layers} entries")
    if any(limit is not None and not (isinstance(limit, int | float) and limit >= 0) for limit in listed):
        raise ModelConfigError(f"config.json: {key}={listed!r}: limits must be numbers >= 0 (0 = no clamp)")
    return tuple(float(limit) if limit else None for limit in listed)


def read_rope_theta(raw: Mapping[str, Any]) -> float:
    """RoPE base, from ``rope_parameters`` where present (transformers), else the plain key."""
    nested = raw.get("rope_parameters") or {}
    return read_above_zero({"rope_theta": nested.get("rope_theta", raw.get("rope_theta"))}, "rope_theta", None)


def read_number(raw: Mapping[str, Any], key: str, default: float | None) -> float:
    """Number under ``key``, or the default where the key is absent or null."""
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST_NUMBER:
        raise ModelConfigError(f"config.json: {key}={value!r}: must be a number")
    return float(value)


def read_above_zero(raw: Mapping[str, Any], key: str, default: float | None) -> float:
    """As :func:`read_number`, for what is divided by or taken to a power."""
    value = read_number(raw, key, default)
    if value <= 0:
        raise ModelConfigError(f"config.json: {key}={value!r}: must be above 0")
    return value


def read_layer_count(raw: Mapping[str, Any]) -> int:
    """Number of trunk layers; a count no model has would only exhaust the memory."""
    count = read_positive(raw, "num_hidden_layers")
    if count > MOST_LAYERS:
        raise ModelConfigError(f"config.json: num_hidden_layers={count}: at most {MOST_LAYERS}")
    return count


def read_names(raw: Mapping[str, Any], key: str) -> list[str] | None:
    """List of names under ``key``, None where the key is absent or null."""
    value = raw.get(key)
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)):
        raise ModelConfigError(f"config.json: {key}={value!r}: must be a list of names")
    return None if value is None else list(value)


def read_nextn_layers(raw: Mapping[str, Any]) -> int:
    """Number of NEXTN layers, 0 or 1."""
    count = raw.get("num_nextn_predict_layers") or 0
    if count not in (0, 1):
        raise ModelConfigError(f"config.json: num_nextn_predict_layers={count!r}: at most one NEXTN layer is supported")
    return count


def read_dtype(raw: Mapping[str, Any]) -> str:
    """Number format the checkpoint claims; absent means bfloat16."""
    name = str(raw.get("dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise ModelConfigError(f"config.json: dtype={name!r}: supported are bfloat16, float16 and float32")
    return name


def read_eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of config.json, then further ones of generation_config.json."""
    ids: list[int] = []
    for file, source in (("config.json", raw), ("generation_config.json", generation)):
        value = source.get("eos_token_id")
        found = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for token_id in found:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelConfigError(f"{file}: eos_token_id={value!r}: must be one or several token ids")
        ids += found
    return tuple(dict.fromkeys(ids))


def read_positive(raw: Mapping[str, Any], key: str) -> int:
    """Positive integer under ``key``.

    Raises:
        ModelConfigError: the key is missing or the value is no positive integer.
    """
    if raw.get(key) is None:
        raise ModelConfigError(f"config.json: required key {key!r} is missing")
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelConfigError(f"config.json: {key}={value!r}: must be a positive integer")
    return value
