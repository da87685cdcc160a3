"""Matrix products, plain torch."""

from torch import Tensor
from torch.nn import functional as F

from sgling_kernel.linear.fixed_rows import in_row_blocks


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
