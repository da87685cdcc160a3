"""A scripted HTTP server for client tests: answers by path, paced, with everything it was asked and when it sent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple


class Piece(NamedTuple):
    """Bytes of a body and the pause before them, in seconds."""

    data: bytes
    pause: float = 0.001


def chunk(text: str, tokens: int, finished: bool = False, **meta) -> bytes:
    """One ``/generate`` line."""
    reason = {"type": "length", "length": tokens} if finished else None
    meta = {"completion_tokens": tokens, "prompt_tokens": 3, "finish_reason": reason, **meta}
    return b"data: " + json.dumps({"text": text, "output_ids": [], "meta_info": meta}).encode()


def paced_answer(runs: list[int], pause: float, first_pause: float) -> list[Piece]:
    """A ``/generate`` answer: one token first, then runs of tokens, each after its pause."""
    total, pieces = 1, [Piece(chunk("a", 1) + b"\n\n", first_pause)]
    for number, run in enumerate(runs):
        total += run
        last = number == len(runs) - 1
        counters = {"spec_verify_ct": len(runs), "spec_num_correct_drafts": sum(runs) - len(runs)} if last else {}
        pieces.append(Piece(chunk("a" * total, total, last, **counters) + b"\n\n", pause))
    return [*pieces, Piece(b"data: [DONE]\n\n", 0.0)]


class ScriptedServer:
    """Answers by path: a status and the body's pieces, or a function of the request's body that gives them.

    ``sent`` holds, per ``/generate``-like answer, when each piece was handed to the socket.
    """

    def __init__(self, answers: dict):
        self.answers = answers
        self.asked: list[tuple[str, dict | None]] = []
        self.running = self.peak = 0
        self.authorization: set[str] = set()
        self.sent: list[list[float]] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = {
            name.lower(): value for name, value in (line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        }
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        path = head.split()[1].split("?")[0]
        asked = json.loads(body) if body else None
        self.asked.append((path, asked))
        self.authorization.add(fields.get("authorization", ""))
        self.running += 1
        self.peak = max(self.peak, self.running)
        status, pieces = self.answers.get(path, (404, [b"{}"]))
        writer.write(f"HTTP/1.1 {status} X\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        times: list[float] = []
        for piece in pieces(asked) if callable(pieces) else pieces:
            data, pause = piece if isinstance(piece, Piece) else Piece(piece)
            await asyncio.sleep(pause)
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            times.append(time.perf_counter())
            await writer.drain()
        self.sent.append(times)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.running -= 1
        writer.close()


def with_server(answers: dict, use: Callable[[str, ScriptedServer], Awaitable]):
    """Run ``await use(url, server)`` against a scripted server."""

    async def body():
        scripted = ScriptedServer(answers)
        async with await asyncio.start_server(scripted.handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await use(f"http://127.0.0.1:{port}", scripted)

    return asyncio.run(body())
