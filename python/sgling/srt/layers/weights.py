"""How layers ask for their weights: by checkpoint name, whole or as this rank's equal part of one dimension.

The model loader implements :class:`WeightSource` over safetensors files and over a random generator; a layer built from
a source holds only its own shard from the start. Layers are plain objects holding tensors: nothing is trained here.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sgling.srt.distributed.parallel_state import ParallelState


class WeightSource(Protocol):
    """Supplier of checkpoint tensors, converted to the serving dtype and placed on the serving device.

    Attributes:
        parallel: group whose rank decides the part ``shard`` returns.
        dtype: model dtype, used where ``dtype`` is None.
        device: device of every returned tensor.
    """

    parallel: ParallelState
    dtype: torch.dtype
    device: str

    def full(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor."""
        ...

    def shard(self, name: str, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's equal part of dimension ``dim``."""
        ...
