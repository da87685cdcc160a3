"""Both kinds of channel: order, waiting, every message type, text that cannot be encoded."""

from __future__ import annotations

import asyncio
import stat
import threading
import time
from pathlib import Path

import pytest

from sgling.srt.managers.channel import QueueChannel
from sgling.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    RequestLogprobs,
    RequestOutput,
    SchedulerDied,
    SchedulerReady,
    ShutdownReq,
    SpecCounters,
    TokenizedGenerateReqInput,
    TokenLogprob,
)
from sgling.srt.managers.zmq_channel import ChannelAddresses, ZmqSchedulerChannel, ZmqTokenizerChannel
from sgling.srt.sampling.sampling_params import SamplingParams

INPUTS = [
    TokenizedGenerateReqInput("a", [1, 2], SamplingParams(stop=["한"], logit_bias={3: 1.5}), token_ids_logprob=[4]),
    AbortReq(rid="a"),
    AbortReq(abort_all=True),
    FlushCacheReqInput("f", 1.5),
    GetInternalStateReq("s"),
    ShutdownReq(),
]
LOGPROBS = RequestLogprobs([TokenLogprob(None, 3)], [[TokenLogprob(-1.0, 2)]], [[]])
OUTPUTS = [
    SchedulerReady(1, 2, 3, 4, {"device": "cpu"}),
    BatchTokenIDOutput(
        [
            RequestOutput("a", [5, 6], 2, 1, logprobs=LOGPROBS, spec=SpecCounters(1, 2, 3, [0, 1], [2])),
            RequestOutput("b", [], 0, 1, finished_reason=FinishReason("stop", matched="x")),
            RequestOutput("c", [], 0, 1, finished_reason=FinishReason("stop", matched=7)),
        ]
    ),
    FlushCacheReqOutput("f", True),
    GetInternalStateReqOutput("s", {"nested": [1, None, 2.5]}),
    SchedulerDied("oops"),
]


@pytest.fixture(params=["queue", "zmq"])
def link(request):
    """Makes (scheduler side, function that makes the tokenizer side on the running loop)."""
    if request.param == "queue":
        channel = QueueChannel()
        yield channel, channel.tokenizer_side
        return
    addresses = ChannelAddresses.create()
    assert stat.S_IMODE(Path(addresses.directory).stat().st_mode) == 0o700
    scheduler = ZmqSchedulerChannel(addresses)
    yield scheduler, lambda: ZmqTokenizerChannel(addresses)
    scheduler.close()
    addresses.remove()
    assert not Path(addresses.directory).exists()


def receive(channel, count: int) -> list:
    """``count`` messages, as a scheduler takes them."""
    found = []
    deadline = time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline:
        channel.wait(0.1)
        found += channel.recv()
    return found


def test_every_message_arrives_in_order(link):
    scheduler, make_tokenizer = link

    async def body():
        tokenizer = make_tokenizer()
        for message in INPUTS:
            tokenizer.send(message)
        assert await asyncio.to_thread(receive, scheduler, len(INPUTS)) == INPUTS
        thread = threading.Thread(target=lambda: [scheduler.send(message) for message in OUTPUTS])
        thread.start()
        for message in OUTPUTS:
            assert await asyncio.wait_for(tokenizer.recv(), 5) == message
        thread.join()
        tokenizer.close()

    asyncio.run(body())


def test_wait_sleeps_and_wakes(link):
    scheduler, make_tokenizer = link
    begin, cpu = time.monotonic(), time.thread_time()
    assert scheduler.recv() == []
    assert not scheduler.wait(0.2)
    assert time.monotonic() - begin >= 0.19
    assert time.thread_time() - cpu < 0.05  # sleeping, not spinning

    async def body():
        tokenizer = make_tokenizer()
        waiting = asyncio.create_task(asyncio.to_thread(scheduler.wait, 5.0))
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        tokenizer.send(ShutdownReq())
        assert await waiting
        assert time.monotonic() - begin < 1.0
        assert receive(scheduler, 1) == [ShutdownReq()]
        tokenizer.close()

    asyncio.run(body())


def test_messages_sent_before_the_other_side_runs_are_kept():
    addresses = ChannelAddresses.create()

    async def body():
        tokenizer = ZmqTokenizerChannel(addresses)
        tokenizer.send(AbortReq(rid="early"))
        scheduler = ZmqSchedulerChannel(addresses)
        assert await asyncio.to_thread(receive, scheduler, 1) == [AbortReq(rid="early")]
        with pytest.raises(UnicodeEncodeError):
            tokenizer.send(AbortReq(rid="\ud800"))
        scheduler.send(SchedulerDied("last words"))
        scheduler.close()  # what was sent still arrives
        assert await asyncio.wait_for(tokenizer.recv(), 5) == SchedulerDied("last words")
        for _ in range(10_000):  # nobody reads any more: sending must not block
            tokenizer.send(ShutdownReq())
        tokenizer.close()

    asyncio.run(body())
    addresses.remove()
