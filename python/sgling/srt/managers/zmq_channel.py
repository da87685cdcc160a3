"""The link between processes: ZeroMQ over IPC sockets in a private directory, messages in msgpack (never pickle).

Each side binds the socket it reads from and connects the one it writes to, so a message sent before the other side
runs is queued, and no send ever blocks.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from sgling.srt.managers.io_struct import SchedulerInput, SchedulerOutput

_LINGER_MS = 2000  # how long a closing process tries to deliver its last message


class ChannelAddresses(NamedTuple):
    """Where the two sides read from: ``scheduler`` takes requests, ``tokenizer`` takes outputs."""

    directory: str
    scheduler: str
    tokenizer: str

    @classmethod
    def create(cls) -> ChannelAddresses:
        """Addresses in a new directory that only this user can enter."""
        directory = tempfile.mkdtemp(prefix="sgling-")
        return cls(directory, f"ipc://{directory}/scheduler", f"ipc://{directory}/tokenizer")

    def remove(self) -> None:
        """Delete the directory with its sockets."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """A socket without a bound on queued messages."""
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, _LINGER_MS)
    socket.set(zmq.RECONNECT_IVL, 10)
    return socket


class ZmqSchedulerChannel:
    """Scheduler's end (:class:`sgling.srt.managers.channel.SchedulerChannel`)."""

    def __init__(self, addresses: ChannelAddresses):
        self._context = zmq.Context()
        self._pull = _socket(self._context, zmq.PULL)
        self._pull.bind(addresses.scheduler)
        self._push = _socket(self._context, zmq.PUSH)
        self._push.connect(addresses.tokenizer)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerInput)

    def recv(self) -> list[SchedulerInput]:
        """Everything that has arrived; never blocks."""
        messages = []
        while True:
            try:
                data = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(data))

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something has arrived (True) or the timeout is over (False)."""
        return bool(self._pull.poll(int(timeout_s * 1000)))

    def send(self, message: SchedulerOutput) -> None:
        """Send one message; never blocks."""
        self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Deliver what was sent and release the sockets."""
        self._pull.close()
        self._push.close()
        self._context.term()


class ZmqTokenizerChannel:
    """Tokenizer manager's end (:class:`sgling.srt.managers.channel.TokenizerChannel`)."""

    def __init__(self, addresses: ChannelAddresses):
        self._context = zmq.Context()
        self._pull = _socket(zmq.asyncio.Context.shadow(self._context.underlying), zmq.PULL)
        self._pull.bind(addresses.tokenizer)
        self._push = _socket(self._context, zmq.PUSH)
        self._push.connect(addresses.scheduler)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerOutput)

    def send(self, message: SchedulerInput) -> None:
        """See :class:`sgling.srt.managers.channel.TokenizerChannel`."""
        self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def recv(self) -> SchedulerOutput:
        """Next message."""
        return self._decoder.decode(await self._pull.recv())

    def close(self) -> None:
        """Release the sockets; messages to a scheduler that is gone are dropped after a moment."""
        self._pull.close()
        self._push.close(linger=200)
        self._context.term()
