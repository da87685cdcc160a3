"""Where the keys of each request lie: the paged view that decode attention reads."""

from typing import NamedTuple

import torch
from torch import Tensor

# Of every GPU form and part of its numerics: positions per split, splits that have a program of their own.
SPLIT, PROGRAMS = 128, 128
LOG2E = 1.4426950408889634


class PagedContext(NamedTuple):
    """Cache rows of a decode or verify forward over bs requests of `width` rows each.

    Attributes:
        req_to_token: int64 [R, Lmax], cache slot of every position of every request row (row 0 is the dummy).
        req_pool_indices: int64 [bs], request row of each request.
        seq_lens: int64 [bs], committed length before the step; row j of a request sees positions <= seq_len + j.
        width: rows per request, root included (host integer).
        kv_bound: host upper bound of every attended length (>= seq_len + width). Only bounds the work; no result
            depends on it.
        early: the page table, ``req_pool_indices``, ``seq_lens`` and the cache below ``seq_lens`` were written at least
            two nodes before the attention that reads them, so that it may fetch them before its predecessor ends.
    """

    req_to_token: Tensor
    req_pool_indices: Tensor
    seq_lens: Tensor
    width: int
    kv_bound: int
    early: bool = False

    def slots(self) -> Tensor:
        """Cache slots int64 [bs, min(kv_bound, Lmax)] in position order; stale beyond seq_len + width."""
        return self.req_to_token[:, : self.kv_bound].index_select(0, self.req_pool_indices)

    def last_visible(self) -> Tensor:
        """Last position each row sees, int64 [bs, width]."""
        return self.seq_lens[:, None] + torch.arange(self.width, device=self.seq_lens.device)
