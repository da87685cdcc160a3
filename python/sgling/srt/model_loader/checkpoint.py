"""Safetensors files of a checkpoint directory: which file holds which tensor, read from index and file headers.

Which files count: those named by ``model.safetensors.index.json`` when it exists, else ``model.safetensors`` alone,
else every ``*.safetensors`` of the directory. Headers are read in full before any weight, so a missing or cut file is
found at once.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.model_loader.errors import ModelLoadError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
READABLE_DTYPES = ("BF16", "F16", "F32")


class StoredTensor(NamedTuple):
    """One tensor as a file header describes it; ``key`` is its name in the file."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Name -> location of every tensor of the checkpoint.

    Raises:
        ModelLoadError: no weight files; a shard named by the index is absent; a tensor named by the index is not in its
            shard; a file is cut off or no safetensors file; two files hold one name.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return _by_index(directory, index)
    single = directory / SINGLE_NAME
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory}: no {INDEX_NAME}, {SINGLE_NAME} or *.safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise ModelLoadError(f"tensor {name} is in both {tensors[name].file} and {file}, and there is no index")
            tensors[name] = tensor
    return tensors


def with_native_names(stored: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The same tensors under public names.

    transformers saves the output projection of a KDA layer as ``dense`` where the public checkpoints have ``o_proj``
    (its rename of the MLA projection applies to both kinds of layer).
    """
    renamed = dict(stored)
    for layer in config.kda_layer_ids:
        theirs, ours = (f"model.layers.{layer}.attention.{leaf}.weight" for leaf in ("dense", "o_proj"))
        if theirs in renamed and ours not in renamed:
            renamed[ours] = renamed.pop(theirs)
    return renamed


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> tensor of one safetensors file; checks that the file is as long as its header says.

    Raises:
        ModelLoadError: naming the file.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= size - 8 else None
    except (struct.error, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: not a safetensors file: {error}") from error
    if header is None:
        raise ModelLoadError(f"{file}: cut off inside its header ({size} bytes)")
    try:
        header.pop("__metadata__", None)
        entries = {name: _HeaderEntry.read(entry) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{file}: damaged header ({type(error).__name__}: {error})") from error
    end = 8 + length + max((entry.end for entry in entries.values()), default=0)
    if end != size:
        raise ModelLoadError(f"{file}: holds {size} bytes, its header says {end}: the file is damaged or cut off")
    return {name: StoredTensor(file, name, entry.dtype, entry.shape) for name, entry in entries.items()}


class _HeaderEntry(NamedTuple):
    """What a file header says of one tensor; ``end``: its last byte, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    end: int

    @classmethod
    def read(cls, entry: dict[str, Any]) -> _HeaderEntry:
        """Check an entry; errors are those of wrong types, or ValueError."""
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"shape {shape} at bytes {begin} to {end}")
        return cls(str(entry["dtype"]), shape, end)


def _by_index(directory: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("shards must be file names")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{index}: no valid index with a weight_map: {error}") from error
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(weight_map.values())):
        if not (directory / name).is_file():
            raise ModelLoadError(f"{directory / name}: shard named by {INDEX_NAME} is missing")
        headers[name] = read_header(directory / name)
    for tensor, shard in weight_map.items():
        if tensor not in headers[shard]:
            raise ModelLoadError(f"tensor {tensor}: {INDEX_NAME} places it in {directory / shard}, which lacks it")
    return {tensor: headers[shard][tensor] for tensor, shard in weight_map.items()}
