"""The only carrier of values from one step to the next.

Every buffer is allocated once, before any graph is captured, and indexed by ``req_pool_idx``: reordering, filtering or
merging the batch never moves a value. Row 0 belongs to padded rows. The host never reads these buffers; what it needs
to know comes in the packed result of a step, one step late.
"""

from __future__ import annotations

import torch

from sgling_kernel.relay import gather_relay, scatter_relay, window_candidates
from sgling_kernel.verdict import Sinks


class FutureMap:
    """Cross-step device buffers.

    ============== ============= ============================ ======================= ============
    buffer          dtype, shape  writer                       reader                  pad (row 0)
    ============== ============= ============================ ======================= ============
    new_seq_lens   int64 [R]     prefill, verdict (publish)   step metadata           0
    output_tokens  int64 [R]     prefill, verdict (publish)   verify, decode (bonus)  any valid id
    topk_index     int64 [R]     prefill, extend (stash)      draft (NEXTN)           any valid id
    hidden_states  dtype [R, H]  prefill, extend (stash)      draft (NEXTN)           unused
    state_slot     int64 [R]     host at admission            step metadata           0
    ============== ============= ============================ ======================= ============
    """

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, device: str):
        def index_buffer() -> torch.Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        self.new_seq_lens = index_buffer()
        self.output_tokens = index_buffer()
        self.topk_index = index_buffer()
        self.state_slot = index_buffer()
        self.hidden_states = torch.zeros(rows, hidden_size, dtype=dtype, device=device)

    def bonus(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """Newest token of each request, int64 [bs]: it has an id but no KV yet; ``req_pool_indices`` int64 [bs]."""
        return gather_relay((self.output_tokens,), req_pool_indices)[0]

    def candidates(self, req_pool_indices: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Windows of a verify: newest token and ``drafts`` int64 [bs, W - 1] of each request -> [bs, W]."""
        return window_candidates(self.output_tokens, req_pool_indices, drafts)

    def draft_seed(self, req_pool_indices: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """What the next NEXTN draft of each request starts from.

        ``token`` int64 [bs] gets the first candidate, produced by the previous extend -> the drafter's hidden state
        behind it, [bs, H].
        """
        hidden = self.hidden_states.new_empty(len(req_pool_indices), self.hidden_states.shape[1])
        gather_relay((self.topk_index, self.hidden_states), req_pool_indices, out=(token, hidden))
        return hidden

    def sinks(self, **others) -> Sinks:
        """Where a verdict goes as soon as it is known, before extend runs; ``others``: the step's own sinks."""
        return Sinks(self.new_seq_lens, self.output_tokens, **others)

    def publish(self, req_pool_indices: torch.Tensor, new_seq_lens: torch.Tensor, bonus: torch.Tensor) -> None:
        """Write lengths and bonus tokens as soon as the verdict is known, before extend runs."""
        scatter_relay((self.new_seq_lens, self.output_tokens), req_pool_indices, (new_seq_lens, bonus))

    def stash(self, req_pool_indices: torch.Tensor, seed: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write what the next draft starts from."""
        scatter_relay((self.topk_index, self.hidden_states), req_pool_indices, (seed, hidden))

    def snapshot_row(self, row: int) -> list[torch.Tensor]:
        """Copy one request's values to host memory (retraction); ``state_slot`` stays behind."""
        kept = (self.new_seq_lens, self.output_tokens, self.topk_index, self.hidden_states)
        return [buffer[row].to("cpu", copy=True) for buffer in kept]

    def restore_row(self, row: int, saved: list[torch.Tensor]) -> None:
        """Write a snapshot into a (possibly different) row."""
        kept = (self.new_seq_lens, self.output_tokens, self.topk_index, self.hidden_states)
        for buffer, value in zip(kept, saved, strict=True):
            buffer[row].copy_(value, non_blocking=True)
