"""Inputs on which SwiGLU forms can differ, and what makes two of them the same function."""

from __future__ import annotations

import torch
from torch import Tensor

GATES = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # every bf16 value
_NAMED = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 2.0**-126, -(2.0**-126), 3.3e38, -3.3e38]
_LIMITS = [s * v for v in (3.984375, 4.0, 4.03125, 4.96875, 5.0, 5.03125, 6.96875, 7.0, 7.03125) for s in (1, -1)]
_SMALL = [s * v for v in (1e-20, 1e-6, 0.125, 0.4, 0.99609375, 1.0, 1.0078125, 2.5, 31.0, 1e4) for s in (1, -1)]
_RANDOM = torch.randn(15, generator=torch.Generator().manual_seed(3)).mul(3).tolist()
UPS = torch.tensor([*_NAMED, *_LIMITS, *_SMALL, *_RANDOM]).bfloat16()  # 64 values
LIMITS = [None, 4.0, 5.0, 7.0]


def ordered(x: Tensor) -> Tensor:
    """bf16 as integers in the order of the numbers, one apart for neighbours; both zeros are 0."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_same_function(got: Tensor, want: Tensor, unequal: float = 1e-3) -> None:
    """NaN and infinities at the same places, the same sign of zero, elsewhere at most neighbours, rarely."""
    assert torch.equal(got.isnan(), want.isnan())
    got, want = (torch.where(x.isnan(), 0, x) for x in (got, want))
    assert torch.equal(got.isinf(), want.isinf())
    zero = (got == 0) & (want == 0)
    assert torch.equal(got.signbit()[zero], want.signbit()[zero])
    apart = (ordered(got) - ordered(want)).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) <= unequal
