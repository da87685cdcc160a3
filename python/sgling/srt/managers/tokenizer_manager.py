"""Tokenizer manager: turns client requests into scheduler requests and scheduler increments into answers.

It lives on one event loop, next to the HTTP routes (or alone under :class:`sgling.Engine`). Every request sent gets
exactly one finishing increment back, also after an abort; ids of completions whose client has gone are remembered
until then, so a client may reuse an id at once without meeting its predecessor's tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from sgling import __version__
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.managers.channel import TokenizerChannel
from sgling.srt.managers.control_calls import ControlCalls
from sgling.srt.managers.generate_req import GenerateReqInput, RequestError, RequestItem
from sgling.srt.managers.health import HEALTH_RID_PREFIX, HealthProbe
from sgling.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ProfileReq,
    ProfileReqOutput,
    RequestOutput,
    SchedulerDied,
    SchedulerOutput,
    SchedulerReady,
    ShutdownReq,
    TokenizedGenerateReqInput,
)
from sgling.srt.managers.profile_req import stop_request
from sgling.srt.managers.request_group import Completion, Delivery, Inbox
from sgling.srt.managers.request_observer import RequestObserver
from sgling.srt.managers.request_preparer import RequestPreparer
from sgling.srt.managers.response import is_failure
from sgling.srt.managers.text_codec import TextCodec

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 2.0  # for aborted requests to end in order


class TokenizerManager:
    """Front end of one scheduler.

    Args:
        server_args: resolved arguments.
        model_config: gives the vocabulary size.
        channel: link to the scheduler.
        tokenizer: ``tokenizers.Tokenizer`` or a transformers fast tokenizer; None serves token ids only.
        observers: told about the life of every request (metrics, request log).

    Attributes:
        scheduler_info: what the scheduler can serve, once it is ready.
        ready: warmed up and not shutting down; the launcher sets it.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        channel: TokenizerChannel,
        tokenizer: Any | None = None,
        observers: Sequence[RequestObserver] = (),
    ):
        self.server_args = server_args
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.codec = None if tokenizer is None else TextCodec(tokenizer)
        self.preparer = RequestPreparer(server_args, model_config, self.codec)
        self.observers = observers
        self.scheduler_info: SchedulerReady | None = None
        self.ready = False
        self.died: str | None = None  # message of a scheduler that has failed
        self.acceptance_smoke: NamedTuple | None = None  # what the smoke at start found
        self.control = ControlCalls(channel)
        self.health = HealthProbe(channel, self._has_live_requests)
        self._channel = channel
        self._live: dict[str, Completion] = {}  # by wire id
        self._gone: set[str] = set()  # wire ids aborted because their client left, finish still to come
        self._suffixes = itertools.count(1)
        self._started = asyncio.Event()  # ready or died
        self._idle = asyncio.Event()
        self._idle.set()
        self._receiver: asyncio.Task | None = None

    # ---- life ----

    async def start(self) -> SchedulerReady:
        """Begin receiving and wait until the scheduler is ready; raises RuntimeError when it dies before."""
        self._receiver = asyncio.create_task(self._receive())
        await self._started.wait()
        if self.scheduler_info is None:
            raise RuntimeError(self.died)
        return self.scheduler_info

    async def close(self) -> None:
        """Abort what is running, then stop the scheduler and the receiver; requests that do not end are failed."""
        if self.died is None:
            self.abort_request(abort_all=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), CLOSE_GRACE_S)
            self._channel.send(ShutdownReq())
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        self._fail_all(RequestError("The server is shut down", 503, "ServiceUnavailable"))
        self._channel.close()

    async def drain(self) -> None:
        """Stop being ready at once; return when every request has finished."""
        self.ready = False
        while self._live and self.died is None:
            await self._idle.wait()

    def scheduler_died(self, message: str) -> None:
        """Fail every waiting request and all later ones; the server is unhealthy from now on."""
        if self.died is not None:
            return
        self.died = message
        self.ready = False
        logger.error("Scheduler died: %s", message)
        self._fail_all(RequestError(f"The scheduler died: {message}", 500, "InternalServerError"))
        self._gone.clear()
        self.control.fail(message)
        self.health.heard()
        self._started.set()
        self._idle.set()

    @property
    def is_healthy(self) -> bool:
        """Whether the scheduler lives and was heard after the last probe that gave up."""
        return self.died is None and self.health.passed

    @property
    def context_len(self) -> int:
        """Prompt plus output, tokens."""
        return self.scheduler_info.context_len

    @property
    def num_live(self) -> int:
        """Completions that have not finished."""
        return len(self._live)

    async def health_check(self, timeout_s: float) -> bool:
        """Whether the engine gives a sign of life within the timeout; concurrent calls share one probe."""
        return self.died is None and await self.health.check(timeout_s) and self.died is None

    # ---- requests ----

    async def generate_request(self, obj: GenerateReqInput) -> AsyncIterator[dict]:
        """Run a request; yields native answers ``{"text", "output_ids", "meta_info"}``, cumulative.

        With ``obj.stream`` one answer per scheduler increment, otherwise only final ones, in prompt order. Batches and
        n > 1 carry ``index``. Closing the iterator aborts what is still running. Raises :class:`RequestError` before
        anything is scheduled when the request is refused, later when the engine fails.
        """
        completions, inbox = await self._admit(obj)
        unfinished = {completion.wire_rid: completion for completion in completions}
        final: list[dict] = []
        try:
            while unfinished:
                completion, output = await inbox.get()
                if isinstance(output, RequestError):
                    raise output
                answer = completion.builder.apply(output)
                if output.finished_reason is not None:
                    del unfinished[completion.wire_rid]
                    final.append(answer)
                if obj.stream:
                    yield answer
        finally:
            for completion in unfinished.values():
                self._abandon(completion)
        if not obj.stream:
            for answer in sorted(final, key=lambda entry: entry.get("index", 0)):
                yield answer

    async def generate_once(self, obj: GenerateReqInput) -> list[dict]:
        """Final answers of a request, in prompt order."""
        async with aclosing(self.generate_request(obj)) as answers:
            return [answer async for answer in answers if answer["meta_info"]["finish_reason"] is not None]

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ask the scheduler to end a request (or all); it ends on its own connection. Unknown ids are harmless."""
        if self.died is not None:
            return
        if abort_all:
            self._channel.send(AbortReq(abort_all=True))
            return
        for completion in self._live.values():
            if rid in (completion.rid, completion.group_rid):
                self._channel.send(AbortReq(rid=completion.wire_rid))

    async def flush_cache(self, timeout_s: float = 0.0) -> tuple[bool, str]:
        """Reset the caches when idle; returns success and a text."""
        return await self.control.flush_cache(timeout_s)

    async def start_profile(self, request: ProfileReq) -> ProfileReqOutput:
        """Start a recording of scheduler steps."""
        return await self.control.profile(request)

    async def stop_profile(self) -> ProfileReqOutput:
        """Stop it and write the files."""
        return await self.control.profile(stop_request())

    async def internal_state(self) -> dict:
        """The scheduler's internal state; the previous one marked ``stale`` when a long step delays the answer."""
        return await self.control.internal_state()

    async def server_info(self) -> dict:
        """Every resolved argument, what the scheduler can serve, and its present state; plain JSON."""
        info = self.scheduler_info
        limits = {name: getattr(info, name) for name in info.__struct_fields__ if name != "info"}
        # limits come last: max_running_requests is an argument too, and the scheduler's number is the true one
        known = {**self.server_args.to_dict(), **info.info, **limits, "version": __version__}
        smoke = None if self.acceptance_smoke is None else self.acceptance_smoke._asdict()
        return {**known, "acceptance_smoke": smoke, "internal_states": [await self.internal_state()]}

    # ---- admission ----

    async def _admit(self, obj: GenerateReqInput) -> tuple[list[Completion], Inbox]:
        """Check everything, then register and send all completions at once."""
        obj.check()
        prepared = await self.preparer.prepare(obj)
        self._check_admission([entry.item for entry in prepared])
        inbox = Inbox()
        wire_rids = self._wire_rids([entry.item.rid for entry in prepared])
        completions = [
            Completion(entry.item, wire_rid, entry.builder, inbox)
            for entry, wire_rid in zip(prepared, wire_rids, strict=True)
        ]
        for completion, entry in zip(completions, prepared, strict=True):
            entry.request.rid = completion.wire_rid
        self._send(completions, [entry.request for entry in prepared])
        return completions, inbox

    def _wire_rids(self, rids: list[str]) -> Iterator[str]:
        """Ids nobody else has on the wire: an abandoned completion keeps its own until its end has come."""
        taken: set[str] = set()
        for rid in rids:
            wire_rid = rid
            while wire_rid in self._gone or wire_rid in self._live or wire_rid in taken:
                wire_rid = f"{rid}~{next(self._suffixes)}"
            taken.add(wire_rid)
            yield wire_rid

    def _check_admission(self, items: list[RequestItem]) -> None:
        """Refuse live duplicates (400), a full queue (503) and a dead scheduler (503)."""
        if self.died is not None:
            raise RequestError(f"The scheduler died: {self.died}", 503, "ServiceUnavailable")
        rids = [item.rid for item in items]
        live = {rid for completion in self._live.values() for rid in (completion.rid, completion.group_rid)}
        for item in items:
            for rid in (item.group_rid, item.rid):
                if rid in live or rid.startswith(HEALTH_RID_PREFIX):
                    raise RequestError(f"Duplicate request id: {rid!r} is still running")
        if len(set(rids)) != len(rids):
            raise RequestError(f"Duplicate request ids in the batch: {rids[:8]}")
        most = self.server_args.max_queued_requests
        if most is not None and len(self._live) + len(rids) - self.scheduler_info.max_running_requests > most:
            raise RequestError("The request queue is full", 503, "ServiceUnavailable")

    def _send(self, completions: list[Completion], requests: list[TokenizedGenerateReqInput]) -> None:
        """Register and send; when a message cannot be encoded none of the request's completions stays."""
        for position, (completion, request) in enumerate(zip(completions, requests, strict=True)):
            try:
                self._channel.send(request)
            except (UnicodeEncodeError, OverflowError, RecursionError) as error:
                for sent in completions[:position]:
                    self._abandon(sent)
                raise RequestError(f"The request holds a value that cannot be passed on: {error}") from error
            self._live[completion.wire_rid] = completion
            self._idle.clear()
            for observer in self.observers:
                observer.received(completion, request)

    def _abandon(self, completion: Completion) -> None:
        """Abort a completion nobody waits for any more."""
        if self._live.pop(completion.wire_rid, None) is None:
            return
        self._gone.add(completion.wire_rid)
        self._channel.send(AbortReq(rid=completion.wire_rid))
        for observer in self.observers:
            observer.abandoned(completion)
        self._note_idle()

    def _finish(self, completion: Completion, delivery: Delivery) -> None:
        self._live.pop(completion.wire_rid, None)
        completion.inbox.put(delivery)
        self._note_idle()

    def _fail_all(self, error: RequestError) -> None:
        for completion in list(self._live.values()):
            self._finish(completion, Delivery(completion, error))

    def _note_idle(self) -> None:
        if not self._live:
            self._idle.set()

    def _has_live_requests(self) -> bool:
        return bool(self._live)

    # ---- receiving ----

    async def _receive(self) -> None:
        """Hand every scheduler message to whoever waits for it."""
        while True:
            self._dispatch(await self._channel.recv())

    def _dispatch(self, message: SchedulerOutput) -> None:
        self.health.heard()
        if isinstance(message, BatchTokenIDOutput):
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, SchedulerReady):
            self.scheduler_info = message
            self.preparer.bind(message)
            self._started.set()
        elif isinstance(message, SchedulerDied):
            self.scheduler_died(message.message)
        else:
            self.control.answer(message)

    def _deliver(self, output: RequestOutput) -> None:
        completion = self._live.get(output.rid)
        finished = output.finished_reason is not None
        if completion is None:
            if finished:
                self._gone.discard(output.rid)
                self.health.finished(output.rid)
            return
        for observer in self.observers:
            observer.output(completion, output)
        if is_failure(output.finished_reason):
            reason = output.finished_reason
            error = RequestError(reason.message or "aborted", reason.status_code, reason.err_type or "AbortError")
            self._finish(completion, Delivery(completion, error))
        elif finished:
            self._finish(completion, Delivery(completion, output))
        else:
            completion.inbox.put(Delivery(completion, output))
