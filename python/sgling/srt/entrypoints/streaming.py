"""Answers that notice when their client leaves: server-sent events, and the wait for a single answer.

Leaving is seen at once, not at the next write: the work is cancelled, which closes the request's iterator, which
aborts the request in the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response

from sgling.srt.entrypoints.errors import ClientGone

T = TypeVar("T")
DONE_EVENT = b"data: [DONE]\n\n"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_encode = msgspec.json.Encoder().encode


def sse_event(content: Any) -> bytes:
    """One event: a JSON object on one ``data:`` line, then a blank line."""
    return b"data: " + _encode(content) + b"\n\n"


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Result of ``work``; cancels it and raises :class:`ClientGone` as soon as the client leaves."""
    return await _race(asyncio.ensure_future(work), request.receive)


async def _race(task: asyncio.Task, receive) -> Any:
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive) -> None:
    """Wait for the end of the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Response that streams events; ``events`` yields encoded ones (:func:`sse_event`, then :data:`DONE_EVENT`).

    The iterator is closed in any case, so its ``finally`` blocks run as soon as the client has gone.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]):
        super().__init__()
        self._events = events

    async def __call__(self, scope, receive, send) -> None:
        """Send the headers at once, then every event as it comes."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await _race(asyncio.ensure_future(self._send_all(send)), receive)
        except (ClientGone, OSError):
            return  # nobody is left to tell
        finally:
            await self._events.aclose()

    async def _send_all(self, send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
