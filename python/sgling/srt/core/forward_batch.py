"""What one model forward reads: ids, positions, cache slots, and which request each row belongs to.

A ``ForwardBatch`` carries device tensors and host integers only. The host integers are facts the scheduler knows by
arithmetic (width, prefix length, an upper bound of the lengths); exact lengths stay on the device.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from sgling.srt.core.ragged import RaggedVerifyLayout


class ForwardMode(Enum):
    """How the rows of a forward relate to the caches."""

    EXTEND = "extend"  # prefill: one request, one chunk of T rows; updates KV, KDA state and conv window
    DECODE = "decode"  # plain decode: one row per request; updates KV, KDA state and conv window in place
    TARGET_VERIFY = "target_verify"  # W rows per request; writes KV, stages KDA inputs or states, pools stay unchanged
    DRAFT_DECODE = "draft_decode"  # NEXTN layer, one row per request
    DRAFT_EXTEND = "draft_extend"  # NEXTN layer, the W rows of a verify with true hidden states
    DRAFT_PREFILL = "draft_prefill"  # NEXTN layer, one chunk of T rows of one request's prompt
    DRAFT_BLOCK = "draft_block"  # DSPARK drafter, the rows of one block per request

    @property
    def is_prefill(self) -> bool:
        """Whether the rows are one chunk of one request's prompt."""
        return self in (ForwardMode.EXTEND, ForwardMode.DRAFT_PREFILL)


class ForwardBatch(NamedTuple):
    """Inputs of one forward over N rows; N = T (prefill chunk) or bs * width.

    Attributes:
        mode: see :class:`ForwardMode`.
        input_ids: int64 [N].
        positions: int64 [N], position of each row in its request.
        out_cache_loc: int64 [N], KV slot each row writes (slot 0 is the dummy of padded rows).
        req_pool_indices: int64 [bs], row of ``req_to_token`` (row 0 is the dummy).
        seq_lens: int64 [bs], committed length **before** this forward, on the device.
        state_slots: int64 [bs], KDA state slot (slot 0 is the dummy).
        width: rows per request (host integer, static under graphs); T for a prefill chunk.
        prefix_len: number of committed tokens before the chunk; prefill only, else 0.
        kv_bound: host upper bound of every attended length (>= seq_len + width); context length under graphs.
        ragged: verify of windows of unequal length: the rows are packed, ``width`` is the longest; else None.
        seq_lens_cpu: ``seq_lens`` as host integers, where an attention backend declares that it needs them.
    """

    mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor
    width: int
    prefix_len: int
    kv_bound: int
    ragged: RaggedVerifyLayout | None = None
    seq_lens_cpu: tuple[int, ...] | None = None


class ModelOutput(NamedTuple):
    """Result of a target forward.

    Attributes:
        hidden: [N, H] after the final norm (what lm_head and the NEXTN layer read).
        taps: [N, m*H] outputs of the ``tap_layers`` side by side, or None when none is asked for.
    """

    hidden: torch.Tensor
    taps: torch.Tensor | None
