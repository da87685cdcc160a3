"""Watchers of requests in the tokenizer process: Prometheus metrics and the request log."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from sgling.srt.managers.generate_req import show
from sgling.srt.managers.io_struct import RequestOutput, TokenizedGenerateReqInput
from sgling.srt.managers.request_group import Completion
from sgling.srt.observability.metrics import FinishedRequest, ServerMetrics

logger = logging.getLogger(__name__)


class RequestObserver(Protocol):
    """Told about every completion; calls come in this order, and one of the last two ends it."""

    def received(self, completion: Completion, request: TokenizedGenerateReqInput) -> None:
        """A checked request is on its way to the scheduler."""

    def output(self, completion: Completion, output: RequestOutput) -> None:
        """An increment has arrived."""

    def abandoned(self, completion: Completion) -> None:
        """The client has gone; the request is being aborted."""


class MetricsObserver:
    """Feeds :class:`ServerMetrics`."""

    def __init__(self, metrics: ServerMetrics):
        self._metrics = metrics
        self._live: dict[str, _Progress] = {}

    def received(self, completion: Completion, request: TokenizedGenerateReqInput) -> None:
        """See :class:`RequestObserver`."""
        self._live[completion.wire_rid] = _Progress(len(request.input_ids))

    def output(self, completion: Completion, output: RequestOutput) -> None:
        """See :class:`RequestObserver`."""
        now, progress = time.monotonic(), self._live[completion.wire_rid]
        if output.new_ids:
            if progress.first_at is None:
                progress.first_at = now
            else:
                self._metrics.observe_inter_token(now - progress.last_at, len(output.new_ids))
            progress.last_at = now
        progress.completion_tokens, progress.cached_tokens = output.completion_tokens, output.cached_tokens
        if output.finished_reason is not None:
            self._end(completion, now, aborted=output.finished_reason.type == "abort")

    def abandoned(self, completion: Completion) -> None:
        """See :class:`RequestObserver`."""
        self._end(completion, time.monotonic(), aborted=True)

    def _end(self, completion: Completion, now: float, aborted: bool) -> None:
        progress = self._live.pop(completion.wire_rid)
        first = None if progress.first_at is None else progress.first_at - completion.created
        self._metrics.observe_request(
            FinishedRequest(
                prompt_tokens=progress.prompt_tokens,
                completion_tokens=progress.completion_tokens,
                cached_tokens=progress.cached_tokens,
                time_to_first_token=first,
                e2e_latency=now - completion.created,
                aborted=aborted,
            )
        )


class _Progress:
    """What is known of a live completion; times in seconds of ``time.monotonic``."""

    def __init__(self, prompt_tokens: int):
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.first_at: float | None = None
        self.last_at = 0.0


class RequestLog:
    """``--log-requests``: one line when a request comes and one when it ends.

    ``level``: 0 metadata, 1 with sampling parameters, 2 with the first prompt ids, 3 with all of them.
    """

    def __init__(self, level: int):
        self._level = level

    def received(self, completion: Completion, request: TokenizedGenerateReqInput) -> None:
        """See :class:`RequestObserver`."""
        parts = [f"Receive: rid={completion.rid!r}, prompt_tokens={len(request.input_ids)}, stream={request.stream}"]
        if self._level >= 1:
            parts.append(f"sampling_params={request.sampling_params}")
        if self._level >= 2:
            parts.append(f"input_ids={request.input_ids if self._level >= 3 else show(request.input_ids)}")
        logger.info("%s", ", ".join(parts))

    def output(self, completion: Completion, output: RequestOutput) -> None:
        """See :class:`RequestObserver`."""
        if output.finished_reason is not None:
            self._log_end(completion, f"{output.finished_reason.to_json()}", output.completion_tokens)

    def abandoned(self, completion: Completion) -> None:
        """See :class:`RequestObserver`."""
        self._log_end(completion, "client gone", None)

    def _log_end(self, completion: Completion, reason: str, tokens: int | None) -> None:
        seconds = time.monotonic() - completion.created
        logger.info(
            "Finish: rid=%r, completion_tokens=%s, seconds=%.3f, reason=%s", completion.rid, tokens, seconds, reason
        )
