"""Streams that begin with their first output: what fails before it is a plain HTTP error, what fails later an event."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi import Request

from sgling.srt.entrypoints.openai.errors import stream_error
from sgling.srt.entrypoints.streaming import DONE_EVENT, EventStream, sse_event, until_disconnect
from sgling.srt.managers.generate_req import RequestError

logger = logging.getLogger(__name__)


async def primed_stream(request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
    """Wait for the first event, then answer with a stream of all of them and ``[DONE]``.

    Raises what ``events`` raises before its first event, and ``ClientGone`` when the client leaves before it; both have
    ended ``events``. Afterwards the stream closes ``events`` however it ends, which aborts the request.
    """
    first = await until_disconnect(request, anext(events))
    return EventStream(_with_errors(first, events))


async def _with_errors(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(events):
        yield first
        try:
            async for event in events:
                yield event
        except RequestError as error:
            yield sse_event(stream_error(error))
        except Exception:
            logger.exception("A stream failed")
            yield sse_event(stream_error(RequestError("Internal server error", 500, "InternalServerError")))
        yield DONE_EVENT
