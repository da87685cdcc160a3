"""Admission and prefill planning: one request at a time, cut at absolute multiples of the chunk size.

Chunk borders depend on the prompt alone, never on what else runs, so the arithmetic of a prefill is reproducible.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from sgling.srt.managers.request import Req, ReqStage
from sgling.srt.managers.resources import RequestResources


class PrefillChunk(NamedTuple):
    """Prompt tokens ``start .. end`` of one request; ``last`` when the chunk ends the prompt."""

    req: Req
    start: int
    end: int
    last: bool


class PrefillPlanner:
    """Waiting queue and the request whose prompt is being read.

    Retracted requests wait at the front of the queue and come back before anybody new is admitted; one that was
    retracted while its prompt was being read goes on where it stopped.
    """

    def __init__(self, resources: RequestResources, chunk_size: int | None):
        self.waiting: deque[Req] = deque()
        self._resources = resources
        self._chunk_size = chunk_size
        self.current: Req | None = None

    def next_chunk(self, running: list[Req]) -> PrefillChunk | None:
        """The next chunk to launch; brings retracted requests back into ``running`` on the way."""
        while self.current is None and self.waiting:
            head = self.waiting[0]
            if not self._resources.fits(head.known_len, len(running)):
                return None
            self.waiting.popleft()
            if head.stage is ReqStage.RETRACTED:
                self._resources.swap_in(head)
                if head.stage is ReqStage.PREFILL:
                    self.current = head
                else:
                    running.append(head)
                continue
            self._resources.admit(head)
            head.stage = ReqStage.PREFILL
            head.admitted_at = time.monotonic()
            self.current = head
        return self._chunk(self.current) if self.current is not None else None

    def _chunk(self, req: Req) -> PrefillChunk:
        start = req.prefilled_len
        end = req.prompt_len
        if self._chunk_size is not None:
            end = min(end, (start // self._chunk_size + 1) * self._chunk_size)
        return PrefillChunk(req, start, end, end == req.prompt_len)

    def launched(self, chunk: PrefillChunk, running: list[Req]) -> None:
        """Book a chunk as launched; after the last one the request decodes from the next iteration on."""
        req = chunk.req
        req.prefilled_len = req.kv_committed_len = chunk.end
        if chunk.last:
            req.stage = ReqStage.RUNNING
            req.launched_steps += 1
            running.append(req)
            self.current = None

    def drop(self, req: Req) -> None:
        """Forget a request that is being aborted, at once: nobody may plan with it (or swap it out) any more."""
        if req is self.current:
            self.current = None
        elif req.stage in (ReqStage.WAITING, ReqStage.RETRACTED):
            self.waiting.remove(req)

    def live(self) -> list[Req]:
        """Requests that wait or are being prefilled."""
        return [*self.waiting, *([self.current] if self.current else [])]
