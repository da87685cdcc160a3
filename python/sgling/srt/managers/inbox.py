"""Requests reach every tensor-parallel rank in the same order: rank 0 receives, then broadcasts."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.managers.channel import SchedulerChannel
from sgling.srt.managers.io_struct import SchedulerInput, SchedulerOutput, TokenizedGenerateReqInput

IDLE_WAIT_SECONDS = 1.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[SchedulerInput])


class Inbox:
    """Rank 0's channel, shared with the other ranks.

    Unseeded requests get their seed here, so that all ranks draw the same noise.
    """

    def __init__(self, channel: SchedulerChannel, parallel: ParallelState, random_seed: int):
        self._channel = channel
        self._parallel = parallel
        self._seeds = random.Random(random_seed)

    @property
    def _leads(self) -> bool:
        return self._parallel.rank == 0

    def receive(self, orders: Callable[[], list[SchedulerInput]]) -> list[SchedulerInput]:
        """What has arrived since the last call; never blocks on rank 0; the others wait for its broadcast.

        ``orders``: what rank 0 itself tells all ranks, itself included; not called on the others.
        """
        messages: list[SchedulerInput] = []
        if self._leads:
            messages = [*self._channel.recv(), *orders()]
            for message in messages:
                if isinstance(message, TokenizedGenerateReqInput) and message.sampling_params.sampling_seed is None:
                    message.sampling_params.sampling_seed = self._seeds.getrandbits(62)
        if self._parallel.size == 1:
            return messages
        return _decoder.decode(self._parallel.broadcast_bytes(_encoder.encode(messages) if self._leads else None))

    def wait(self) -> None:
        """Sleep until something arrives; other ranks wait in their next broadcast instead."""
        if self._leads:
            self._channel.wait(IDLE_WAIT_SECONDS)

    def send(self, message: SchedulerOutput) -> None:
        """Send to the tokenizer process (rank 0; the other ranks' outputs are equal and dropped)."""
        if self._leads:
            self._channel.send(message)
