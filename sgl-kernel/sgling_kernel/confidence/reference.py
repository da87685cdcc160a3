"""Survival of drafts and the split of a row budget over a batch, plain torch (docs/dspark.md §2.5 and 2.6).

Losslessness: for a fixed budget, whether draft j of a request is verified depends on its survival, a function of drafts
before j, and on other requests; later drafts of the same request always rank behind it, so draft j never decides about
its own check.
"""

import torch
from torch import Tensor

from sgling_kernel.linear.reference import linear_fp32
from sgling_kernel.pointwise import sigmoid


def confidence_logits(hidden: Tensor, embedded: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """Raw logits fp32 [N] of the confidence head (docs/dspark.md §1.5).

    ``hidden`` [N, d] and ``embedded`` [N, rank] (None: the head does not read it), model dtype; ``weight`` fp32
    [1, d + rank], ``bias`` fp32 [1].
    """
    x = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
    return linear_fp32(x, weight)[:, 0] + bias


def survival(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Estimated probability that drafts 1 .. j are all accepted, fp32 [bs, gamma]; NaN counts as 0.

    ``logits`` fp32 [bs, gamma] of the confidence head, ``temperatures`` fp32 [gamma] of sequential scaling.
    """
    return sigmoid(logits / temperatures).cumprod(-1).nan_to_num(0.0)


def allocate_rows(survival: Tensor, real: Tensor, total_rows: int, width: int) -> Tensor:
    """Rows of each request's verify, int64 [bs]: the root and its share of the budget; 0 for padded requests.

    The ``total_rows - (number of real requests)`` drafts that rank highest are verified: by survival downwards, then
    position upwards, then request upwards. Survival must not increase along a request's drafts.

    Args:
        survival: fp32 [bs, gamma].
        real: bool [bs], False for padded requests.
        total_rows: rows of the whole verify (host integer), at least the number of real requests.
        width: W <= gamma + 1, most rows of one request.
    """
    bs, drafts = survival.shape[0], width - 1
    budget = total_rows - real.sum()
    value = torch.where(real.unsqueeze(-1), survival[:, :drafts], -1.0).T.flatten()  # position-major: ties by position
    order = value.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    chosen = (rank < budget).view(drafts, bs).sum(0)
    return torch.where(real, chosen + 1, 0)
