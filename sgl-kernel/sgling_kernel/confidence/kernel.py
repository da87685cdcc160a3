"""The confidence head in Triton: one program per draft (see reference.py)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait


@triton.jit
def _confidence_kernel(
    hidden, embedded, weight, bias, out, stride_h, stride_e,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    pdl_trigger(PDL)
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    value = tl.load(hidden + n * stride_h + d, mask=d < D, other=0.0).to(tl.float32)
    total = tl.sum(value * tl.load(weight + d, mask=d < D, other=0.0), 0)
    if R > 0:
        r = tl.arange(0, BR)
        value = tl.load(embedded + n * stride_e + r, mask=r < R, other=0.0).to(tl.float32)
        total += tl.sum(value * tl.load(weight + D + r, mask=r < R, other=0.0), 0)
    tl.store(out + n, total + tl.load(bias))


def confidence_logits(hidden: Tensor, embedded: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """reference.confidence_logits; rows may be strided."""
    (count, dim), rank = hidden.shape, 0 if embedded is None else embedded.shape[1]
    out = torch.empty(count, dtype=torch.float32, device=hidden.device)
    rows = hidden if embedded is None else embedded
    _confidence_kernel[(count,)](
        hidden, rows, weight, bias, out, hidden.stride(0), rows.stride(0), D=dim, R=rank,
        BD=triton.next_power_of_2(dim), BR=max(1, triton.next_power_of_2(rank)), num_warps=4, **launch_pdl(hidden),
    )  # fmt: skip
    return out
