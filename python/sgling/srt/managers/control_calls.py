"""Calls to the scheduler that are no generation: flush the caches, read the internal state, profile."""

from __future__ import annotations

import asyncio
import uuid

from sgling.srt.managers.channel import TokenizerChannel
from sgling.srt.managers.generate_req import RequestError
from sgling.srt.managers.io_struct import (
    ControlOutput,
    FlushCacheReqInput,
    GetInternalStateReq,
    ProfileReq,
    ProfileReqOutput,
    SchedulerInput,
)

STATE_TIMEOUT_S = 2.0  # a scheduler in a long step answers after it; /server_info must not wait that long
PROFILE_TIMEOUT_S = 300.0  # a file of many steps takes a while to write
FLUSH_MARGIN_S = 30.0  # on top of the caller's own timeout: the step under way


class ControlCalls:
    """Matches answers to questions by ``req_id``."""

    def __init__(self, channel: TokenizerChannel):
        self._channel = channel
        self._waiting: dict[str, asyncio.Future] = {}
        self._last_state: dict = {}
        self._died: str | None = None

    async def _ask(self, req_id: str, message: SchedulerInput, timeout_s: float):
        """Send a question and wait for its answer; raises TimeoutError, or RequestError when the scheduler is dead."""
        if self._died is not None:
            raise RequestError(f"The scheduler died: {self._died}", 503, "ServiceUnavailable")
        future = self._waiting[req_id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(message)
            return await asyncio.wait_for(future, timeout_s)
        finally:
            del self._waiting[req_id]

    async def flush_cache(self, timeout_s: float) -> tuple[bool, str]:
        """See :meth:`TokenizerManager.flush_cache`."""
        req_id = uuid.uuid4().hex
        try:
            answer = await self._ask(req_id, FlushCacheReqInput(req_id, timeout_s), timeout_s + FLUSH_MARGIN_S)
        except TimeoutError:
            return False, "The scheduler did not answer."
        return answer.success, answer.message

    async def internal_state(self) -> dict:
        """See :meth:`TokenizerManager.internal_state`."""
        req_id = uuid.uuid4().hex
        try:
            answer = await self._ask(req_id, GetInternalStateReq(req_id), STATE_TIMEOUT_S)
        except TimeoutError:
            return {**self._last_state, "stale": True}
        self._last_state = answer.state
        return answer.state

    async def profile(self, request: ProfileReq) -> ProfileReqOutput:
        """Start or stop a profile."""
        try:
            return await self._ask(request.req_id, request, PROFILE_TIMEOUT_S)
        except TimeoutError:
            return ProfileReqOutput(request.req_id, False, "The scheduler did not answer.")

    def answer(self, message: ControlOutput) -> None:
        """Hand an answer to its caller; one whose caller has given up is dropped."""
        future = self._waiting.get(message.req_id)
        if future is not None and not future.done():
            future.set_result(message)

    def fail(self, died: str) -> None:
        """Fail all present and later calls."""
        self._died = died
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RequestError(f"The scheduler died: {died}", 503, "ServiceUnavailable"))
