"""Turns committed tokens into messages: which increments leave when, with their logprobs and counters."""

from __future__ import annotations

from sgling.srt.core.step import LogprobTensors
from sgling.srt.managers.io_struct import (
    BatchTokenIDOutput,
    FinishReason,
    RequestLogprobs,
    RequestOutput,
    SpecCounters,
    TokenLogprob,
)
from sgling.srt.managers.request import Req

FORCE_SEND_INTERVAL = 50  # tokens after which a non-streaming request reports too, so that health probes see life


class Increment:
    """Tokens of one request that have not been sent yet."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.run_lengths: list[int] = []
        self.logprobs = RequestLogprobs()


class OutputStreamer:
    """Collects increments and builds the messages of a step."""

    def __init__(self, default_interval: int, spec_enabled: bool):
        self._default_interval = default_interval
        self._spec_enabled = spec_enabled
        self._pending: dict[Req, Increment] = {}
        self._ready: list[RequestOutput] = []

    def add(self, req: Req, ids: list[int], logprobs: list[RequestLogprobs]) -> None:
        """Book the tokens one step committed; ``logprobs`` holds one entry per token, or nothing."""
        increment = self._pending.setdefault(req, Increment())
        increment.ids.extend(ids)
        increment.run_lengths.append(len(ids))
        for entry in logprobs:
            increment.logprobs.tokens += entry.tokens
            increment.logprobs.top += entry.top
            increment.logprobs.token_ids += entry.token_ids

    def flush(self, req: Req) -> None:
        """Queue a message for the request if it has ended or enough tokens have gathered."""
        increment = self._pending.get(req)
        interval = (req.params.stream_interval or self._default_interval) if req.recv.stream else FORCE_SEND_INTERVAL
        first = len(req.output_ids) == len(increment.ids) if increment else False
        due = increment is not None and (len(increment.ids) >= interval or (first and req.recv.stream))
        if req.finished_reason is None and not due:
            return
        self._pending.pop(req, None)
        self._ready.append(self._message(req, increment or Increment(), req.finished_reason))

    def _message(self, req: Req, increment: Increment, reason: FinishReason | None) -> RequestOutput:
        output = RequestOutput(
            rid=req.rid,
            new_ids=increment.ids,
            completion_tokens=len(req.output_ids),
            prompt_tokens=req.prompt_len,
            num_retractions=req.num_retractions,
            finished_reason=reason,
        )
        if req.recv.return_logprob:
            output.logprobs = increment.logprobs
            if not req.input_logprobs_sent and req.input_logprobs:
                output.input_logprobs = RequestLogprobs(req.input_logprobs, req.input_top, req.input_extra)
                req.input_logprobs_sent = True
        if self._spec_enabled:
            spec = req.spec
            output.spec = SpecCounters(
                verify_ct=spec.verify_ct,
                correct_drafts=spec.correct_drafts,
                proposed_drafts=spec.proposed_drafts,
                accept_histogram=list(spec.accept_histogram),
                run_lengths=increment.run_lengths,
                width_histogram=list(req.depth.width_histogram),
                depth_reason=spec.depth_reason,
            )
        return output

    def take(self) -> BatchTokenIDOutput | None:
        """The message of this step, or None when nothing is due."""
        if not self._ready:
            return None
        ready, self._ready = self._ready, []
        return BatchTokenIDOutput(ready)


class HostLogprobs:
    """Logprob tensors of a step as Python lists (already on the host), sliced per token."""

    def __init__(self, tensors: LogprobTensors, token_ids: tuple[int, ...]):
        self._token = tensors.token.tolist()
        self._top_values = tensors.top_values.tolist()
        self._top_ids = tensors.top_ids.tolist()
        self._extra = tensors.extra.tolist()
        self._column = {token_id: i for i, token_id in enumerate(token_ids)}

    def entry(self, row: int, token_id: int, req: Req) -> RequestLogprobs:
        """Logprobs of one token, with as many alternatives as its request asked for."""
        count = req.recv.top_logprobs_num
        top = zip(self._top_values[row][:count], self._top_ids[row][:count], strict=True)
        wanted = req.recv.token_ids_logprob
        return RequestLogprobs(
            tokens=[TokenLogprob(self._token[row], token_id)],
            top=[[TokenLogprob(value, int(index)) for value, index in top]],
            token_ids=[[TokenLogprob(self._extra[row][self._column[i]], i) for i in wanted]],
        )
