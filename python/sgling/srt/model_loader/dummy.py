"""Random weights for ``--load-format dummy``: a rule that keeps activations alive and routing close to uniform.

Norms are 1 and biases 0; every other tensor is uniform with its own seed, the CRC of its name: embeddings +-1.73,
linears +-sqrt(3 / fan_in), convolutions +-0.6, A_log +-1, dt_bias in (-2, 0). This is the rule the upstream engine was
measured with. The whole tensor is drawn and then cut, so ranks of any tensor-parallel size agree.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch

from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.model_loader.inventory import TensorSpec


class DummyWeightSource:
    """``WeightSource`` of random tensors; attributes as ``FileWeightSource``."""

    def __init__(self, specs: Mapping[str, TensorSpec], parallel: ParallelState, dtype: torch.dtype, device: str):
        """``specs``: the tensors that may be asked for."""
        self.specs = specs
        self.parallel = parallel
        self.dtype = dtype
        self.device = device
        self.loaded_bytes = 0
        self.loaded_tensors = 0

    def full(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor."""
        return self._count(dummy_tensor(name, self.specs[name], self.device), dtype)

    def shard(self, name: str, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's equal part of dimension ``dim``."""
        whole = dummy_tensor(name, self.specs[name], self.device)
        return self._count(whole.narrow(dim, *self.parallel.shard(whole.shape[dim])), dtype)

    def _count(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        kept = tensor.to(dtype or self.dtype).clone(memory_format=torch.contiguous_format)
        self.loaded_bytes += kept.nbytes
        self.loaded_tensors += 1
        return kept


def dummy_tensor(name: str, spec: TensorSpec, device: str) -> torch.Tensor:
    """The whole fp32 tensor of one name; the same values for a name and shape on every rank of one device kind."""
    if name.endswith("norm.weight"):
        return torch.ones(spec.shape, device=device)
    if name.endswith(("expert_bias", ".bias")):
        return torch.zeros(spec.shape, device=device)
    low, high = _bounds(name, spec)
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(spec.shape, device=device).uniform_(low, high, generator=generator)


def _bounds(name: str, spec: TensorSpec) -> tuple[float, float]:
    if name.endswith("dt_bias"):
        return -2.0, 0.0
    if name.endswith("A_log"):
        limit = 1.0
    elif name.endswith("conv1d.weight"):
        limit = 0.6
    elif name.endswith("word_embeddings.weight"):
        limit = 1.73
    else:
        limit = math.sqrt(3 / spec.shape[1])
    return -limit, limit
