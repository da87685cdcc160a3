"""A scripted scheduler that speaks io_struct over a channel: the server is tested without a model.

The script of a request is read from its prompt ids (see :func:`script_of`), so it works in a thread and in a process.
"""

from __future__ import annotations

import time

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
    SchedulerReady,
    ShutdownReq,
    SpecCounters,
    TokenizedGenerateReqInput,
    TokenLogprob,
)

CONTEXT_LEN = 256
MAX_INPUT_LEN = 200
MAX_RUNNING = 4
EOS = 1

# A prompt that begins with one of these ids asks for something special; any other prompt is repeated as the answer.
CRASH, SLOW, MUTE, REFUSE = 300, 301, 302, 303
SLOW_STEP_S = 0.02
RUN_LEN = 3  # tokens per step


class FakeRequest:
    """One scripted request."""

    def __init__(self, recv: TokenizedGenerateReqInput):
        self.recv = recv
        self.sent = 0
        self.verify_ct = 0
        limit = recv.sampling_params.max_new_tokens
        self.limit = CONTEXT_LEN - len(recv.input_ids) if limit is None else limit

    def step(self) -> RequestOutput:
        """The next increment: up to RUN_LEN ids of the endlessly repeated prompt; EOS ends the answer."""
        prompt, params = self.recv.input_ids, self.recv.sampling_params
        ids: list[int] = []
        reason = None
        while len(ids) < RUN_LEN and reason is None:
            if self.sent >= self.limit:
                reason = FinishReason(type="length", length=self.sent)
                break
            ids.append(prompt[self.sent % len(prompt)])
            self.sent += 1
            if ids[-1] == EOS and not params.ignore_eos:
                reason = FinishReason(type="stop", matched=EOS)
            elif ids[-1] in params.stop_token_ids:
                reason = FinishReason(type="stop", matched=ids[-1])
            elif self.sent >= self.limit:
                reason = FinishReason(type="length", length=self.sent)
        self.verify_ct += 1
        return self.output(ids, reason)

    def output(self, ids: list[int], reason: FinishReason | None) -> RequestOutput:
        """An increment with everything the request asked for."""
        recv = self.recv
        output = RequestOutput(
            rid=recv.rid,
            new_ids=ids,
            completion_tokens=self.sent,
            prompt_tokens=len(recv.input_ids),
            finished_reason=reason,
            spec=SpecCounters(self.verify_ct, 1, 3 * self.verify_ct, [0, 1], [len(ids)]),
        )
        if recv.return_logprob:
            output.logprobs = self.logprobs(ids)
            if recv.logprob_start_len >= 0 and self.verify_ct <= 1:
                output.input_logprobs = self.logprobs(recv.input_ids[recv.logprob_start_len :])
                if recv.logprob_start_len == 0:
                    output.input_logprobs.tokens[0].logprob = None
                    output.input_logprobs.top[0] = []
        return output

    def logprobs(self, ids: list[int]) -> RequestLogprobs:
        """Made-up logprobs, distinct per token."""
        top, extra = self.recv.top_logprobs_num, self.recv.token_ids_logprob
        return RequestLogprobs(
            tokens=[TokenLogprob(-0.5 * i, i) for i in ids],
            top=[[TokenLogprob(-float(k), k) for k in range(top)] for _ in ids],
            token_ids=[[TokenLogprob(-2.0, t) for t in extra] for _ in ids],
        )


class FakeScheduler:
    """Serves scripted requests, one step of each per iteration."""

    def __init__(self, channel):
        self.channel = channel
        self.live: dict[str, FakeRequest] = {}
        self.seen: list[str] = []  # rids in order of arrival
        self.aborted: list[str] = []
        self.flushes = 0
        self.stopped = False

    def start_info(self) -> SchedulerReady:
        """Small fixed limits."""
        return SchedulerReady(4096, MAX_INPUT_LEN, MAX_RUNNING, CONTEXT_LEN, {"device": "fake"})

    def run(self) -> None:
        """Serve until shut down; a rank without a channel has nothing to do until its process is ended."""
        while self.channel is None:
            time.sleep(0.05)
        while not self.stopped:
            if not self.live:
                self.channel.wait(1.0)
            for message in self.channel.recv():
                self.handle(message)
            self.iterate()

    def handle(self, message) -> None:
        """One message."""
        if isinstance(message, TokenizedGenerateReqInput):
            self.admit(message)
        elif isinstance(message, AbortReq):
            for rid in [rid for rid in self.live if message.abort_all or rid == message.rid]:
                self.aborted.append(rid)
                self.finish(rid, FinishReason(type="abort", message="Aborted by the client"))
        elif isinstance(message, FlushCacheReqInput):
            self.flushes += 1
            self.channel.send(FlushCacheReqOutput(message.req_id, not self.live, "" if not self.live else "busy"))
        elif isinstance(message, GetInternalStateReq):
            state = {"avg_spec_accept_length": 2.5, "num_running_reqs": len(self.live), "seen": self.seen}
            self.channel.send(GetInternalStateReqOutput(message.req_id, state))
        elif isinstance(message, ShutdownReq):
            self.stopped = True

    def admit(self, recv: TokenizedGenerateReqInput) -> None:
        """Take a request, unless its script says otherwise."""
        self.seen.append(recv.rid)
        self.live[recv.rid] = FakeRequest(recv)
        kind = recv.input_ids[0]
        if kind == CRASH:
            raise ValueError("scripted crash")
        if kind == REFUSE:
            self.finish(recv.rid, FinishReason("abort", None, None, "out of memory", 500, "InternalServerError"))

    def finish(self, rid: str, reason: FinishReason) -> None:
        """End a request from outside."""
        self.channel.send(BatchTokenIDOutput([self.live.pop(rid).output([], reason)]))

    def iterate(self) -> None:
        """One step of every request."""
        outputs = []
        if self.live and all(request.recv.input_ids[0] == MUTE for request in self.live.values()):
            self.channel.wait(0.02)
        for rid, request in list(self.live.items()):
            kind = request.recv.input_ids[0]
            if kind == MUTE:
                continue
            if kind == SLOW:
                time.sleep(SLOW_STEP_S)
            outputs.append(request.step())
            if outputs[-1].finished_reason is not None:
                del self.live[rid]
        if outputs:
            self.channel.send(BatchTokenIDOutput(outputs))


def create_fake_scheduler(job, channel, parallel) -> FakeScheduler:
    """Factory for the scheduler process and thread."""
    return FakeScheduler(channel)
