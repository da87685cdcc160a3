"""One request as the scheduler sees it: its tokens, what it owns, and where it stands."""

from __future__ import annotations

import time
from enum import Enum
from typing import NamedTuple

import torch

from sgling.srt.managers.io_struct import FinishReason, SpecCounters, TokenizedGenerateReqInput, TokenLogprob
from sgling.srt.speculative.depth import RequestDepth


class ReqStage(Enum):
    """Life of a request; only forward moves, except RUNNING or PREFILL <-> RETRACTED."""

    WAITING = "waiting"
    PREFILL = "prefill"
    RUNNING = "running"
    RETRACTED = "retracted"  # swapped out to host memory, waits to come back
    FINISHED = "finished"


class SwappedState(NamedTuple):
    """A retracted request in host memory: nothing is ever prefilled again.

    Attributes:
        kv, draft_kv: latent rows of the committed positions; ``draft_kv`` is None without a drafter.
        conv, temporal: KDA window and state of every layer.
        relay: FutureMap row.
        sampling: snapshot of the sampling row.
    """

    kv: torch.Tensor
    draft_kv: torch.Tensor | None
    conv: torch.Tensor
    temporal: torch.Tensor
    relay: list[torch.Tensor]
    sampling: object


class Req:
    """A request and the resources it owns.

    ``kv_committed_len`` advances when a chunk is launched or a decode result is processed, so it lags the device by at
    most one step;
    ``kv_slots`` is everything reserved (whole pages). ``output_ids`` holds emitted tokens only. ``created_at`` and
    ``admitted_at`` (None before) are seconds of ``time.monotonic``.
    """

    def __init__(self, recv: TokenizedGenerateReqInput, max_new_tokens: int, depth: RequestDepth):
        self.rid = recv.rid
        self.recv = recv
        self.params = recv.sampling_params
        self.input_ids = recv.input_ids
        self.max_new_tokens = max_new_tokens
        self.depth = depth
        self.output_ids: list[int] = []
        self.stage = ReqStage.WAITING
        self.finished_reason: FinishReason | None = None
        self.created_at = time.monotonic()
        self.admitted_at: float | None = None

        self.req_pool_idx = 0
        self.state_slot = 0
        self.kv_slots: list[int] = []
        self.prefilled_len = 0
        self.kv_committed_len = 0
        self.launched_steps = 0  # steps that give tokens (the last chunk included), launched and not yet processed
        self.swapped: SwappedState | None = None

        self.num_retractions = 0
        self.spec = SpecCounters()
        self.input_logprobs: list[TokenLogprob] = []
        self.input_top: list[list[TokenLogprob]] = []
        self.input_extra: list[list[TokenLogprob]] = []
        self.input_logprobs_sent = False
        if self.wants_prompt_logprobs and recv.logprob_start_len == 0 and self.input_ids:  # nothing precedes it
            self.input_logprobs.append(TokenLogprob(None, self.input_ids[0]))
            self.input_top.append([])
            self.input_extra.append([])

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_ids)

    @property
    def known_len(self) -> int:
        """Positions whose tokens are known: the prompt, and what has been committed behind it."""
        return max(self.prompt_len, self.kv_committed_len)

    @property
    def finished(self) -> bool:
        """Whether the request has ended; later results about it are dropped."""
        return self.stage is ReqStage.FINISHED

    @property
    def ends_in_flight(self) -> bool:
        """Whether steps already launched will reach the length limit: every step commits at least one token."""
        return len(self.output_ids) + self.launched_steps >= self.max_new_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens were asked for."""
        return self.recv.return_logprob and self.recv.logprob_start_len >= 0
