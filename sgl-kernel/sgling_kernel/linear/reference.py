"""Matrix products, plain torch."""

import torch
from torch import Tensor
from torch.nn import functional as F

from sgling_kernel.linear.fixed_rows import in_row_blocks
from sgling_kernel.norm import reference as norm
from sgling_kernel.pointwise import sigmoid


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x [N, K] times w [O, K] transposed -> [N, O] in x.dtype: fp32 accumulation, one rounding.

    x and w share a dtype (fp32 or bf16). In fixed-row mode a row's bits do not depend on N.
    """
    return in_row_blocks(lambda rows: F.linear(rows, w), x)


def linear_fp32(x: Tensor, w: Tensor) -> Tensor:
    """x [N, K] times w [O, K] transposed -> fp32 [N, O], never rounded to the model dtype (router, lm_head).

    bf16 operands are widened first, which is exact; the widened weight is not kept, so a bf16 call pays for one fp32
    copy of w (fp32 operands pay nothing). Source: docs/ling3.md §3.3.
    """
    return linear(x.float(), w.float())


def gated_linear(o: Tensor, z: Tensor, norm_weight: Tensor, eps: float, w: Tensor) -> Tensor:
    """KDA's gated norm and output projection: norm(o) · norm_weight · σ(z), rounded, times w transposed.

    o [N, H, V], z [N, H·V], norm_weight [V] shared by the heads, w [O, H·V] -> [N, O] in o.dtype. Source:
    docs/ling3.md §3.1 step 6.
    """
    return linear(norm.gated_rms_norm(o, z, norm_weight, eps).flatten(1), w)


def gated_linear_folded(o: Tensor, z: Tensor, norm_weight: Tensor, eps: float, w: Tensor) -> Tensor:
    """The same product with 1 / rms taken out of the rounding: what the CUDA C++ form computes.

    Per head h: x_h = round(o_h · norm_weight · σ(z_h)) in the model dtype, then Σ_h (x_h · w_hᵀ) / rms(o_h) in fp32 and
    one rounding. It differs from :func:`gated_linear` by where one rounding to the model dtype sits, and saves a node.
    """
    wide = o.float()
    scale = (wide.square().mean(-1) + eps).rsqrt()
    x = (wide * norm_weight * sigmoid(z.float()).view(o.shape)).to(o.dtype).float()
    heads = torch.einsum("nhv,ohv->nho", x, w.float().view(w.shape[0], *o.shape[1:]))
    return (heads * scale[..., None]).sum(1).to(o.dtype)
