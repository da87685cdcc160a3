"""Weights from safetensors files: a rank reads the byte ranges of its own shard and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.model_loader.checkpoint import StoredTensor
from sgling.srt.model_loader.errors import ModelLoadError

logger = logging.getLogger(__name__)


class FileWeightSource:
    """``WeightSource`` over the tensors of a checked checkpoint.

    Every tensor is converted to the asked dtype by value. Narrowing (F32 to a 16-bit type, F16 to bf16 or the reverse)
    is logged once per load.

    Attributes:
        loaded_bytes: bytes handed out so far, in the serving dtype: what this rank's weights occupy.
        loaded_tensors: checkpoint tensors handed out so far.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], parallel: ParallelState, dtype: torch.dtype, device: str):
        self.stored = stored
        self.parallel = parallel
        self.dtype = dtype
        self.device = device
        self.loaded_bytes = 0
        self.loaded_tensors = 0
        self._open: dict[Path, safe_open] = {}
        self._narrowing_logged = False

    def full(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor."""
        return self._convert(name, self._slice(name)[:], dtype)

    def shard(self, name: str, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's equal part of dimension ``dim`` (0 or 1)."""
        start, size = self.parallel.shard(self.stored[name].shape[dim])
        part = self._slice(name)
        rows = part[start : start + size] if dim == 0 else part[:, start : start + size]
        return self._convert(name, rows, dtype)

    def equal(self, name: str, other: str) -> bool:
        """Whether two stored tensors hold the same values."""
        return self.stored[name].shape == self.stored[other].shape and bool(
            torch.equal(self._slice(name)[:].float(), self._slice(other)[:].float())
        )

    def _slice(self, name: str):
        file, key = self.stored[name].file, self.stored[name].key
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            return self._open[file].get_slice(key)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"tensor {name} cannot be read from {file}: {error}") from error

    def _convert(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        dtype = dtype or self.dtype
        held = self.stored[name].dtype
        narrows = tensor.dtype is not dtype and dtype.itemsize <= 2
        if narrows and not self._narrowing_logged:
            self._narrowing_logged = True
            logger.warning("weights are narrowed from %s to %s (first: %s)", held, dtype, name)
        converted = tensor.to(device=self.device, dtype=dtype)
        self.loaded_bytes += converted.nbytes
        self.loaded_tensors += 1
        return converted
