"""The target as a drafter's trainer sees it: teacher-forced features of packed rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling.srt.config.model_config import ModelConfig

from ..export import read_checkpoint
from ..model import Pico
from ..ops import make_layout, rms_norm
from .rows import RowBatch
from .text_format import TextFormat


class Features(NamedTuple):
    """Packed rows and what the target computes of them: taps [R, S, m*d], hidden [R, S, d] after the final norm."""

    rows: RowBatch
    taps: torch.Tensor
    hidden: torch.Tensor

    def part(self, first: int, last: int) -> Features:
        """Rows ``first`` ... ``last`` - 1."""
        return Features(RowBatch(*(value[first:last] for value in self.rows)), *(v[first:last] for v in self[1:]))


class Target:
    """A frozen target on the training device.

    Attributes:
        model: the training forward with the checkpoint's weights.
        taps: layers whose output streams are features (-1: the embedding).
    """

    def __init__(self, text: TextFormat, device: str, dtype: torch.dtype, taps: tuple[int, ...] = ()) -> None:
        self.text, self.taps, self.device = text, taps, device
        self.model = Pico(text.config, dtype)
        read_checkpoint(self.model, text.directory)
        self.model.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def features(self, rows: RowBatch) -> Features:
        """One teacher-forced forward over packed rows."""
        starts = (rows.positions.flatten() == 0).nonzero().flatten().tolist()
        layout = make_layout(starts, rows.tokens.numel(), self.device)
        rows = RowBatch(*(value.to(self.device) for value in rows))
        x = self.model.embed(rows.tokens.flatten())
        found = [x] if -1 in self.taps else []
        for index, layer in enumerate(self.model.layers):
            x = layer(x, layout)
            if index in self.taps:
                found.append(x)
        hidden = rms_norm(x, self.model.norm, self.model.config.rms_norm_eps)
        taps = torch.cat(found, dim=-1) if found else hidden[:, :0]
        return Features(rows, *(value.unflatten(0, rows.tokens.shape) for value in (taps, hidden)))


def default_taps(config: ModelConfig) -> tuple[int, ...]:
    """At most five layers: an early one, those behind full attention, the last two usable ones (docs/dspark.md §1.2).

    The last layer is no tap. A two-layer target has the embedding and its first layer.
    """
    last = config.num_hidden_layers - 2
    if last < 1:
        return (-1, 0) if last == 0 else (-1,)
    ordered = sorted({1, *(layer for layer in config.mla_layer_ids if layer <= last), last - 1, last})
    while len(ordered) > 5:
        ordered.pop(len(ordered) // 2)
    return tuple(ordered)
