"""Compares what a checkpoint holds with what the config asks for, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.model_loader.checkpoint import READABLE_DTYPES, StoredTensor
from sgling.srt.model_loader.errors import ModelLoadError
from sgling.srt.model_loader.inventory import TensorSpec, expected_tensors

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_NEXTN_MARK = re.compile(r"^model\.layers\.(\d+)\.eh_proj\.weight$")
_MIXTURE = re.compile(r"\.mlp\.(experts\.|shared_experts\.|gate\.)")
_LEFTOVER = re.compile(r"^model\.mtp|inv_freq|v_head")


class Unused(NamedTuple):
    """Tensors of the files that no layer asks for.

    Attributes:
        ignored: names without a meaning in this config, to be reported.
        duplicates: (name, name of the tensor it must equal): own copies of shared or tied tensors.
    """

    ignored: tuple[str, ...]
    duplicates: tuple[tuple[str, str], ...]


def check_inventory(stored: Mapping[str, StoredTensor], config: ModelConfig, with_nextn: bool) -> Unused:
    """Every expected tensor is there in a readable dtype and the right shape, and nothing essential is left over.

    Raises:
        ModelLoadError: naming the first offending tensor and its file.
    """
    _check_nextn_place(stored, config)
    expected = expected_tensors(config, with_nextn)
    for name, spec in expected.items():
        check_tensor(name, spec, stored.get(name))
    return _sort_unused([name for name in stored if name not in expected], stored, config)


def _check_nextn_place(stored: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    """The NEXTN layer of the files follows the last trunk layer; else it would serve as a trunk layer."""
    for name, tensor in stored.items():
        mark = _NEXTN_MARK.match(name)
        if mark and int(mark[1]) != config.nextn_layer_id:
            raise ModelLoadError(
                f"tensor {name} in {tensor.file} marks layer {mark[1]} as the NEXTN layer, "
                f"but num_hidden_layers={config.num_hidden_layers} puts it at layer {config.nextn_layer_id}"
            )


def check_tensor(name: str, spec: TensorSpec, tensor: StoredTensor | None) -> None:
    """Refuse a tensor that is absent, of another shape, or in a number format that cannot be read."""
    if tensor is None:
        raise ModelLoadError(f"tensor {name} {list(spec.shape)} is in none of the checkpoint's files")
    if tensor.shape != spec.shape:
        raise ModelLoadError(
            f"tensor {name} in {tensor.file} has shape {list(tensor.shape)}, the config asks for {list(spec.shape)}"
        )
    if tensor.dtype not in READABLE_DTYPES:
        supported = ", ".join(READABLE_DTYPES)
        raise ModelLoadError(f"tensor {name} in {tensor.file} is {tensor.dtype}: supported are {supported}")


def _sort_unused(names: list[str], stored: Mapping[str, StoredTensor], config: ModelConfig) -> Unused:
    nextn = f"model.layers.{config.nextn_layer_id}."
    has_nextn = f"{nextn}eh_proj.weight" in stored
    twins = {
        "lm_head.weight": "model.word_embeddings.weight",
        f"{nextn}embed_tokens.weight": "model.word_embeddings.weight",
        f"{nextn}shared_head.head.weight": _head_name(config),
    }
    nextn_names = expected_tensors(config, with_nextn=True).keys() if has_nextn else ()
    ignored, duplicates = [], []
    for name in names:
        if name in twins:
            duplicates.append((name, twins[name]))
        elif _LEFTOVER.search(name):
            ignored.append(name)
        elif name not in nextn_names:
            _refuse_essential(name, stored[name], config, has_nextn)
            ignored.append(name)
    return Unused(tuple(sorted(ignored)), tuple(duplicates))


def _head_name(config: ModelConfig) -> str:
    return "model.word_embeddings.weight" if config.tie_word_embeddings else "lm_head.weight"


def _refuse_essential(name: str, tensor: StoredTensor, config: ModelConfig, has_nextn: bool) -> None:
    """A layer or expert that the config does not account for means config and weights do not belong together."""
    layer = _LAYER.match(name)
    known = config.num_hidden_layers + has_nextn
    if layer and int(layer[1]) >= known:
        raise ModelLoadError(
            f"tensor {name} in {tensor.file}: the config accounts for layers 0 to {known - 1} only "
            f"(num_hidden_layers={config.num_hidden_layers})"
        )
    if layer and _MIXTURE.search(name):
        raise ModelLoadError(
            f"tensor {name} in {tensor.file}: the config has no such expert tensor (num_experts={config.num_experts}, "
            f"first_k_dense_replace={config.first_k_dense_replace})"
        )
