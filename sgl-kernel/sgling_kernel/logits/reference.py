"""Arg-max of score rows. The lowest id wins every tie and NaN never wins, on every device and rank."""

from __future__ import annotations

import torch


def argmax_lowest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Best score of each row and its column: ``scores`` [N, V] -> (fp32 [N], int64 [N]).

    Columns are local: a vocabulary shard adds its first id before reducing. NaN counts as -inf; a row without any
    finite score gives column 0. ``torch.max`` returns the first maximal index by contract.
    """
    clean = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = clean.max(dim=-1)
    return best.values, best.indices
