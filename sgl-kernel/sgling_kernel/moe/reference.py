"""Feed-forward operators, plain torch (docs/ling3.md §3.4): the specification."""

import torch
from torch import Tensor

from sgling_kernel.linear import linear, linear_fp32
from sgling_kernel.moe.outputs import ExpertOutputs
from sgling_kernel.norm import reference as norm
from sgling_kernel.pointwise import silu


def interleave_w13(gate: Tensor, up: Tensor) -> Tensor:
    """Merge gate and up weights [..., I, d] into one [..., 2I, d]: gate row i -> 2i, up row i -> 2i + 1.

    Done once at load: a kernel tile then holds both halves of a pair. Bitwise neutral.
    """
    return torch.stack((gate, up), dim=-2).flatten(-3, -2)


def swiglu(gu: Tensor, limit: float | None) -> Tensor:
    """Clamped SwiGLU of interleaved pairs gu [..., 2I] -> [..., I], same dtype.

    min(silu(g), limit) * clamp(u, -limit, limit): the clamp follows the SiLU and has no lower bound on the gate side.
    limit None or 0 means no clamp. gu is already rounded to the model dtype; widened to fp32, product rounded once.
    """
    wide = gu.float()
    activated, up = silu(wide[..., 0::2]), wide[..., 1::2]
    if limit:
        activated = activated.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return (activated * up).to(gu.dtype)


def dense_ffn(x: Tensor, w13: Tensor, w2: Tensor, limit: float | None) -> Tensor:
    """Dense or shared FFN: x [N, d], interleaved w13 [2I, d], w2 [d, I] -> [N, d], one rounding per product."""
    return linear(swiglu(linear(x, w13), limit), w2)


def moe_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, limit: float | None) -> Tensor:
    """Sum over a row's experts of weight * expert(x): every expert on every row, then pick.

    x [N, d], w13 [E, 2I, d] interleaved, w2 [E, d, I], weights fp32 [N, k], ids int64 [N, k] -> [N, d] in x.dtype.
    The down product stays fp32, is weighed and summed over slots in fp32, and rounded once. An expert that no row
    chose has no influence, whatever its weights hold.
    """
    slots = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
    for expert in range(w13.shape[0]):
        out = linear_fp32(swiglu(linear(x, w13[expert]), limit), w2[expert])
        slots = torch.where((ids == expert)[..., None], out[:, None], slots)
    return (slots * weights[..., None]).sum(1).to(x.dtype)


def combine(outputs: ExpertOutputs) -> Tensor:
    """The layer's output [N, d]: routed slots weighed and summed in fp32, rounded; plus the rounded shared expert."""
    top_k = outputs.weights.shape[1]
    routed = (outputs.values[:, :top_k] * outputs.weights[..., None]).sum(1).to(outputs.dtype)
    return routed + outputs.values[:, top_k].to(outputs.dtype) if outputs.has_shared else routed


def combine_add_rms_norm(outputs: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, new residual) of the layer's output + residual, both [N, d]; the roundings of the two steps."""
    return norm.fused_add_rms_norm(combine(outputs), residual, weight, eps)
