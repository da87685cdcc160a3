"""Which running requests take part in the next decode step, and who is retracted when KV runs out."""

from __future__ import annotations

import logging

from sgling.srt.managers.prefill import PrefillPlanner
from sgling.srt.managers.request import Req, ReqStage
from sgling.srt.managers.resources import RequestResources

logger = logging.getLogger(__name__)


class DecodePlanner:
    """Running requests in arrival order."""

    def __init__(self, resources: RequestResources, prefill: PrefillPlanner):
        self.running: list[Req] = []
        self._resources = resources
        self._prefill = prefill
        self.num_retracted = 0
        self.awaits_result = False  # the last next_batch was empty because a result must be processed first

    def next_batch(self, in_flight: bool) -> list[Req]:
        """Requests of the next step, KV reserved. Empty: nothing to decode, or a result must be processed first.

        Requests whose length limit is already reached by steps in flight are left out. When KV is short and steps are
        in flight, the caller processes them first (they may free enough); otherwise the youngest request is swapped
        out and goes back to the front of the queue. The youngest of all is the one whose prompt is being read.
        """
        self.awaits_result = False
        self.running = [req for req in self.running if not req.finished]
        batch: list[Req] = []
        for req in [req for req in self.running if not req.ends_in_flight]:
            if req.stage is not ReqStage.RUNNING:  # retracted a moment ago to make room
                continue
            while not self._resources.reserve_step(req):
                if in_flight:
                    self.awaits_result = True
                    return []
                victim = self._prefill.current or self.running[-1]
                self._retract(victim)
                if victim in batch:
                    batch.remove(victim)
                if victim is req:
                    return batch
            batch.append(req)
        return batch

    def _retract(self, victim: Req) -> None:
        if victim is self._prefill.current:
            self._prefill.current = None
        else:
            self.running.remove(victim)
        self._resources.swap_out(victim)
        self._prefill.waiting.appendleft(victim)
        self.num_retracted += 1
        logger.info("KV cache is full: request %s swapped out (retraction %d)", victim.rid, victim.num_retractions)
