"""A small HTTP/1.1 client on asyncio streams: one connection per request, lines stamped as they arrive.

The bench measures single milliseconds, so nothing stands between the socket and the clock. As upstream's client, every
request opens a new connection.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

_LINE_LIMIT = 1 << 26  # bytes; a chunk carries the cumulative text and ids of a long answer


class HttpStatusError(Exception):
    """An answer whose status is not 200."""

    def __init__(self, status: int, body: str):
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status


class HttpResponse(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes

    def json(self):
        """The body as JSON. Raises :class:`HttpStatusError` unless the status is 200."""
        if self.status != 200:
            raise HttpStatusError(self.status, self.body.decode(errors="replace"))
        return json.loads(self.body)


class _Connection:
    """One request on its own connection; use as an async context manager."""

    def __init__(self, url: str):
        self._url = urlsplit(url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ValueError(f"not an http(s) URL: {url!r}")
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None

    async def __aenter__(self) -> _Connection:
        port = self._url.port or (443 if self._tls else 80)
        self._reader, self._writer = await asyncio.open_connection(
            self._url.hostname, port, ssl=self._tls, limit=_LINE_LIMIT
        )
        return self

    async def __aexit__(self, *_exc) -> None:
        self._writer.close()

    async def send(self, method: str, body: bytes | None, headers: Mapping[str, str]) -> int:
        """Send the request and read the head of the answer; returns the status."""
        target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._url.netloc}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))
        await self._writer.drain()
        return await self._read_head()

    async def _read_head(self) -> int:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.split(":", 1) for line in head[1:] if ":" in line)
        self._head = {name.strip().lower(): value.strip() for name, value in fields}
        return int(head[0].split()[1])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives: chunks of a chunked answer, else whatever the socket gives."""
        if self._head.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            return
        left = int(self._head.get("content-length", -1))
        while left != 0:
            piece = await self._reader.read(1 << 16)
            if not piece:
                if left > 0:
                    raise ConnectionError(f"connection closed with {left} bytes missing")
                return
            left = max(left - len(piece), 0) if left > 0 else left
            yield piece


async def fetch(method: str, url: str, payload=None, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """One request, whole answer. ``payload`` is sent as JSON."""
    body = None if payload is None else json.dumps(payload).encode()
    async with _Connection(url) as connection:
        status = await connection.send(method, body, headers or {})
        return HttpResponse(status, b"".join([piece async for piece in connection.pieces()]))


async def stream_lines(url: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """POST ``body`` and yield the answer's non-empty lines as they arrive.

    Raises :class:`HttpStatusError` unless the status is 200.
    """
    async with _Connection(url) as connection:
        status = await connection.send("POST", body, headers)
        if status != 200:
            text = b"".join([piece async for piece in connection.pieces()])
            raise HttpStatusError(status, text.decode(errors="replace"))
        rest = b""
        async for piece in connection.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.strip():
                    yield line.strip()
        if rest.strip():
            yield rest.strip()
