"""The pools a model forward reads and writes, as one value."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling.srt.mem_cache.kv_pool import MLATokenToKVPool
from sgling.srt.mem_cache.linear_state_pool import LinearStatePool
from sgling_kernel.kda import ReplayRing, StagedBuffers


class MemoryPools(NamedTuple):
    """Everything that lives longer than a forward.

    Attributes:
        req_to_token: int64 [R, Lmax]; KV slot of each position of each request row (row 0 is the dummy).
        kv: latent cache of the target's MLA layers.
        draft_kv: cache of the NEXTN layer or of the DSPARK drafter (same slot numbers), or None without a drafter.
        state: KDA states.
        rollback: where verify leaves what commit needs; None when nothing is ever verified (plain decode).
    """

    req_to_token: torch.Tensor
    kv: MLATokenToKVPool
    draft_kv: MLATokenToKVPool | None
    state: LinearStatePool
    rollback: StagedBuffers | ReplayRing | None
