"""Health probe: does the engine give a sign of life?

An idle engine runs a one-token request; a busy one is asked for its state between two steps, so a long prefill is
healthy as long as its steps end, and no probe ever waits in the queue behind users. One probe runs at a time, whoever
asks; one that gets no answer is aborted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from sgling.srt.managers.channel import TokenizerChannel
from sgling.srt.managers.io_struct import AbortReq, GetInternalStateReq, TokenizedGenerateReqInput
from sgling.srt.sampling.sampling_params import SamplingParams

HEALTH_RID_PREFIX = "HEALTH_CHECK"  # no client may use such ids


class HealthProbe:
    """Sends probes and notices signs of life.

    Args:
        channel: link to the scheduler.
        is_busy: whether any client request is under way.

    Attributes:
        passed: no probe has given up since the scheduler was last heard.
    """

    def __init__(self, channel: TokenizerChannel, is_busy: Callable[[], bool]):
        self.passed = True
        self._channel = channel
        self._is_busy = is_busy
        self._numbers = itertools.count(1)
        self._sign = asyncio.Event()
        self._probe: asyncio.Task | None = None
        self._open_rid: str | None = None  # probe request whose finish has not come

    def heard(self) -> None:
        """Anything arrived from the scheduler: it is alive, also when a probe has given up on it."""
        self.passed = True
        self._sign.set()

    def finished(self, rid: str) -> None:
        """A request that belongs to no client has finished."""
        if rid == self._open_rid:
            self._open_rid = None

    async def check(self, timeout_s: float) -> bool:
        """Whether a sign of life comes within the timeout; joins a probe that is under way."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run(timeout_s))
        return await asyncio.shield(self._probe)

    async def _run(self, timeout_s: float) -> bool:
        self._sign.clear()
        rid = f"{HEALTH_RID_PREFIX}_{next(self._numbers)}"
        if self._is_busy() or self._open_rid is not None:
            self._channel.send(GetInternalStateReq(rid))
        else:
            params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
            self._open_rid = rid
            self._channel.send(TokenizedGenerateReqInput(rid=rid, input_ids=[0], sampling_params=params))
        try:
            await asyncio.wait_for(self._sign.wait(), timeout_s)
        except TimeoutError:
            self.passed = False
            if self._open_rid is not None:
                self._channel.send(AbortReq(rid=self._open_rid))
        return self.passed
