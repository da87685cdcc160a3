"""What the scheduler does with each kind of message."""

from __future__ import annotations

import time
from functools import singledispatchmethod

from tokenizers import Tokenizer

from sgling.srt.managers import internal_state
from sgling.srt.managers.finish import FinishChecker
from sgling.srt.managers.io_struct import (
    AbortReq,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    ProfileReq,
    SchedulerInput,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sgling.srt.managers.profiler import SchedulerProfiler
from sgling.srt.managers.request import Req
from sgling.srt.managers.scheduler_core import SchedulerCore
from sgling.srt.managers.text_codec import TextCodec


class RequestIntake:
    """Dispatches messages to the scheduler's parts."""

    def __init__(self, core: SchedulerCore, tokenizer: Tokenizer | None, profiler: SchedulerProfiler):
        self._core = core
        self._profiler = profiler
        self._codec = None if tokenizer is None else TextCodec(tokenizer)
        plan = core.runner.plan
        self._longest = min(plan.context_len, plan.max_total_tokens - plan.page_size - core.resources.window)
        self._eos_ids = frozenset(core.runner.model_config.eos_token_ids)
        self._flushes: list[tuple[FlushCacheReqInput, float]] = []

    @property
    def max_prompt_len(self) -> int:
        """Longest prompt that leaves room for one token."""
        return self._longest - 1

    @singledispatchmethod
    def handle(self, message: SchedulerInput) -> None:
        """Act on one message."""
        raise TypeError(f"unknown message {type(message).__name__}")

    @handle.register
    def _generate(self, message: TokenizedGenerateReqInput) -> None:
        core, params = self._core, message.sampling_params
        room = self._longest - len(message.input_ids)
        limit = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        req = Req(message, limit, core.depth.join(message.speculative_max_width))
        error = self._refusal(req, room)
        if error is None:
            try:
                checker = FinishChecker(params, limit, self._eos_ids, self._codec)
            except ValueError as reason:
                error = str(reason)
        if error is not None:
            reason = FinishReason(type="abort", message=error, status_code=400, err_type="BadRequestError")
            core.results.finish(req, reason)
            core.send_outputs()
            return
        core.results.register(req, checker)
        core.add(req)

    def _refusal(self, req: Req, room: int) -> str | None:
        if not req.input_ids:
            return "the prompt is empty"
        vocab_size = self._core.runner.model_config.vocab_size
        bad = next((i for i in req.input_ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            return f"token id {bad} is outside the vocabulary of {vocab_size}"
        if room < 1:
            return f"the prompt has {req.prompt_len} tokens, the KV cache and context hold {self._longest - 1}"
        if any(other.rid == req.rid for other in self._core.live_requests()):
            return f"a request with rid {req.rid!r} is running"
        return None

    @handle.register
    def _abort(self, message: AbortReq) -> None:
        core = self._core
        for req in core.live_requests():
            if message.abort_all or req.rid == message.rid:
                core.abort(req, message.message, message.status_code)
        core.send_outputs()

    @handle.register
    def _flush(self, message: FlushCacheReqInput) -> None:
        self._flushes.append((message, time.monotonic() + message.timeout))
        self.answer_flushes()

    def answer_flushes(self) -> None:
        """Answer flush requests: at once when idle, with a refusal when their time is up."""
        core, now = self._core, time.monotonic()
        waiting = []
        for message, deadline in self._flushes:
            if core.is_idle:
                core.stats.reset()
                core.inbox.send(FlushCacheReqOutput(message.req_id, True))
            elif now >= deadline:
                running = len(core.live_requests())
                text = f"{running} requests are running or waiting"
                core.inbox.send(FlushCacheReqOutput(message.req_id, False, text))
            else:
                waiting.append((message, deadline))
        self._flushes = waiting

    @handle.register
    def _state(self, message: GetInternalStateReq) -> None:
        self._core.inbox.send(GetInternalStateReqOutput(message.req_id, internal_state.snapshot(self._core)))

    @handle.register
    def _profile(self, message: ProfileReq) -> None:
        self._core.inbox.send(self._profiler.handle(message))

    @handle.register
    def _shutdown(self, message: ShutdownReq) -> None:
        for req in self._core.live_requests():
            self._core.abort(req, "The server is shutting down")
        self._core.send_outputs()
        self._core.stopped = True
