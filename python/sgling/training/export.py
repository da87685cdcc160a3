"""Public names: writes the trained model as BF16 / F32 safetensors shards with an index, and reads them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .model import KDA, MLA, DenseFFN, MoE, Pico

SHARD_LIMIT = 14 * 1024 * 1024
KEPT_FP32 = ("A_log", "dt_bias", "expert_bias")


def _kda(prefix: str, kda: KDA) -> Iterator[tuple[str, torch.Tensor]]:
    for index, name in enumerate("qkvfg"):
        yield f"{prefix}.{name}_proj.weight", kda.qkvfg.data[index]
    for name, part in zip("qkv", kda.conv.data.chunk(3), strict=True):
        yield f"{prefix}.{name}_conv1d.weight", part.unsqueeze(1)
    yield f"{prefix}.b_proj.weight", kda.beta.data
    yield f"{prefix}.A_log", kda.a_log.data
    yield f"{prefix}.dt_bias", kda.dt_bias.data
    yield f"{prefix}.o_norm.weight", kda.o_norm.data
    yield f"{prefix}.o_proj.weight", kda.o_proj.data


def _mla(prefix: str, mla: MLA) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}.q_proj.weight", mla.q_proj.data
    yield f"{prefix}.kv_a_proj_with_mqa.weight", mla.kv_a.data
    yield f"{prefix}.kv_a_layernorm.weight", mla.kv_norm.data
    yield f"{prefix}.kv_b_proj.weight", mla.kv_b.data
    yield f"{prefix}.g_proj.weight", mla.gate.data
    yield f"{prefix}.dense.weight", mla.dense.data


def _ffn(prefix: str, ffn: MoE | DenseFFN) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(ffn, DenseFFN):
        for name in ("gate", "up", "down"):
            yield f"{prefix}.{name}_proj.weight", getattr(ffn, name).data
        return
    yield f"{prefix}.gate.weight", ffn.router_weight.data
    yield f"{prefix}.gate.expert_bias", ffn.expert_bias
    for name in ("gate", "up", "down"):
        for index, expert in enumerate(getattr(ffn, name).data):
            yield f"{prefix}.experts.{index}.{name}_proj.weight", expert
        yield f"{prefix}.shared_experts.{name}_proj.weight", getattr(ffn, f"shared_{name}").data


def public_tensors(model: Pico) -> Iterator[tuple[str, torch.Tensor]]:
    """(public name, view of the master weight) of every tensor (docs/ling3.md §2); writes go into the model."""
    yield "model.word_embeddings.weight", model.embedding.data
    yield "model.norm.weight", model.norm.data
    yield "lm_head.weight", model.head.data
    layers = [*model.layers, model.nextn.layer]
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", layer.attention.input_norm.data
        yield f"{prefix}.post_attention_layernorm.weight", layer.ffn.post_norm.data
        yield from (_kda if isinstance(layer.attention, KDA) else _mla)(f"{prefix}.attention", layer.attention)
        yield from _ffn(f"{prefix}.mlp", layer.ffn)
    prefix = f"model.layers.{len(model.layers)}"
    yield f"{prefix}.eh_proj.weight", model.nextn.eh_proj.data
    yield f"{prefix}.enorm.weight", model.nextn.enorm.data
    yield f"{prefix}.hnorm.weight", model.nextn.hnorm.data
    yield f"{prefix}.final_layernorm.weight", model.nextn.final_norm.data


def disk_dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(KEPT_FP32) else torch.bfloat16


@torch.no_grad()
def round_to_disk(model: Pico) -> None:
    """Rounds the master weights to the values on disk, so that drafters train on the weights that are served."""
    for name, view in public_tensors(model):
        view.copy_(view.to(disk_dtype(name)))


def write_checkpoint(model: Pico, folder: Path) -> list[str]:
    """Writes shards of at most 14 MiB and ``model.safetensors.index.json``; returns the shard names."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, view in public_tensors(model):
        tensor = view.to(disk_dtype(name)).contiguous().cpu()
        if size + tensor.nbytes > SHARD_LIMIT:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.clone()
        size += tensor.nbytes
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, str(folder / name), metadata={"format": "pt"})
        (folder / name).chmod(0o644)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return names


@torch.no_grad()
def read_checkpoint(model: Pico, folder: Path) -> None:
    """Fills the model from shards written by ``write_checkpoint``; every tensor must be there."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        found.update(load_file(str(folder / name)))
    for name, view in public_tensors(model):
        view.copy_(found.pop(name))
    if found:
        raise ValueError(f"tensors this model does not have: {sorted(found)[:5]}")
