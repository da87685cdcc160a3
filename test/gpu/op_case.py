"""What a case of the op tests is, the table of all of them, and the shapes of one of four tensor-parallel ranks.

A case says what the node right before may write (``fresh``), how the operator is called and what it changes in place.
To add an operator, write a function ``rows -> Case`` under ``@case``. Operands that are not in ``fresh`` are weights,
caches that earlier steps wrote, or gathered at the head of the step: by contract final when the node before starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

HIDDEN, HEADS, DIM, VOCAB, FFN = 2560, 8, 128, 39296, 1536
WIDTH = HEADS * DIM
EXPERTS, TOP_K, EXPERT_WIDTH = 512, 8, 192
LATENT, ROPE, CONTEXT = 512, 64, 8192
LAYERS, RING, DEPTH = 35, 64, 17
EPS = 1e-6
BF16 = torch.bfloat16


class Case(NamedTuple):
    """One operator call.

    Attributes:
        fresh: operands the node right before may write; row-wise operators have one row per leading index.
        run: fresh -> outputs, new tensors.
        touched: operands changed in place.
        by_row: whether row i of every output depends on row i of ``fresh`` alone.
    """

    fresh: dict[str, Tensor]
    run: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
    touched: tuple[Tensor, ...] = ()
    by_row: bool = True


CASES: dict[str, Callable[[int], Case]] = {}


def case(name: str) -> Callable[[Callable[[int], Case]], Callable[[int], Case]]:
    """Enter a function ``rows -> Case`` into the table."""

    def enter(make: Callable[[int], Case]) -> Callable[[int], Case]:
        CASES[name] = make
        return make

    return enter


def build(name: str, rows: int, device: str = "cuda") -> Case:
    """A case with the same operands every time."""
    torch.manual_seed(7)
    with torch.device(device):
        return CASES[name](rows)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(BF16)


def weight(outputs: int, inputs: int) -> Tensor:
    return normal(outputs, inputs, scale=inputs**-0.5)
