"""Links between the tokenizer side (asyncio) and the scheduler (a loop in a thread or a process of its own).

``SchedulerChannel`` is what a scheduler holds, ``TokenizerChannel`` what a tokenizer manager holds. Messages arrive in
the order sent. :class:`QueueChannel` links two threads; :mod:`sgling.srt.managers.zmq_channel` links processes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Protocol

from sgling.srt.managers.io_struct import SchedulerInput, SchedulerOutput


class SchedulerChannel(Protocol):
    """Scheduler's end; used from one thread."""

    def recv(self) -> list[SchedulerInput]:
        """Everything that has arrived; never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something has arrived (True) or the timeout is over (False)."""

    def send(self, message: SchedulerOutput) -> None:
        """Send one message; never blocks."""


class TokenizerChannel(Protocol):
    """Tokenizer manager's end; used from one event loop."""

    def send(self, message: SchedulerInput) -> None:
        """Send one message; never blocks. A value that cannot be encoded raises UnicodeEncodeError or OverflowError."""

    async def recv(self) -> SchedulerOutput:
        """Next message."""

    def close(self) -> None:
        """Release the link; messages already sent are still delivered."""


class QueueChannel:
    """Both ends of an in-process link; thread-safe, no copies and no encoding."""

    def __init__(self):
        self._down: deque[SchedulerInput] = deque()
        self._arrived = threading.Condition()
        self._up: deque[SchedulerOutput] = deque()
        self._up_lock = threading.Lock()
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def recv(self) -> list[SchedulerInput]:
        """See :class:`SchedulerChannel`."""
        with self._arrived:
            messages = list(self._down)
            self._down.clear()
        return messages

    def wait(self, timeout_s: float) -> bool:
        """See :class:`SchedulerChannel`."""
        with self._arrived:
            return self._arrived.wait_for(lambda: bool(self._down), timeout_s)

    def send(self, message: SchedulerOutput) -> None:
        """See :class:`SchedulerChannel`."""
        with self._up_lock:
            self._up.append(message)
            if self._reader is not None:
                loop, event = self._reader
                if not loop.is_closed():  # a reader that has gone away needs no wake-up
                    loop.call_soon_threadsafe(event.set)

    def tokenizer_side(self) -> QueueTokenizerChannel:
        """The other end."""
        return QueueTokenizerChannel(self)


class QueueTokenizerChannel:
    """Tokenizer end of a :class:`QueueChannel`; binds to the event loop of its first :meth:`recv`."""

    def __init__(self, channel: QueueChannel):
        self._channel = channel
        self._event = asyncio.Event()

    def send(self, message: SchedulerInput) -> None:
        """See :class:`TokenizerChannel`."""
        with self._channel._arrived:
            self._channel._down.append(message)
            self._channel._arrived.notify()

    async def recv(self) -> SchedulerOutput:
        """See :class:`TokenizerChannel`."""
        channel = self._channel
        while True:
            with channel._up_lock:
                channel._reader = (asyncio.get_running_loop(), self._event)
                if channel._up:
                    return channel._up.popleft()
                self._event.clear()
            await self._event.wait()

    def close(self) -> None:
        """See :class:`TokenizerChannel`."""
        with self._channel._up_lock:
            self._channel._reader = None
