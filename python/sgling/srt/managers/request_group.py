"""Live completions of one client request and the inbox their increments arrive in."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple

from sgling.srt.managers.generate_req import RequestError, RequestItem
from sgling.srt.managers.io_struct import RequestOutput
from sgling.srt.managers.response import ResponseBuilder


class Completion:
    """One completion the scheduler works on.

    Attributes:
        rid: the client's id, unique among live completions.
        group_rid: id that addresses all completions of the prompt (n > 1, batches with one id).
        wire_rid: id the scheduler knows it by.
        created: arrival, seconds of ``time.monotonic``.
    """

    def __init__(self, item: RequestItem, wire_rid: str, builder: ResponseBuilder, inbox: Inbox):
        self.rid = item.rid
        self.group_rid = item.group_rid
        self.wire_rid = wire_rid
        self.builder = builder
        self.inbox = inbox
        self.created = time.monotonic()


class Delivery(NamedTuple):
    """An increment, or the error that ended the completion."""

    completion: Completion
    output: RequestOutput | RequestError


class Inbox:
    """Deliveries of one client request, in order; increments stay raw until the client's task takes them."""

    def __init__(self):
        self._waiting: deque[Delivery] = deque()
        self._arrived = asyncio.Event()

    def put(self, delivery: Delivery) -> None:
        """Add one delivery."""
        self._waiting.append(delivery)
        self._arrived.set()

    async def get(self) -> Delivery:
        """Next delivery."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()
