"""Programmatic dependent launch of Triton kernels: a node may start while the one before it drains.

Rule for every kernel that takes part: all programs wait before they read or write anything a previous node touches
(weights may be loaded before), and trigger right after the wait. A node whose neighbours take no part runs in order.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel import dispatch

__all__ = ["launch_pdl", "pdl_trigger", "pdl_wait"]


@triton.jit
def pdl_wait(ON: tl.constexpr):
    """Until the previous node has ended and its writes are visible."""
    if ON:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_trigger(ON: tl.constexpr):
    """Let the next node start; it waits for this one's end by itself."""
    if ON:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def _capable(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def launch_pdl(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel with a ``PDL`` parameter, for operands like ``x``."""
    if dispatch.pdl_enabled() and x.is_cuda and _capable(x.device.index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
