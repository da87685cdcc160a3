"""Processing of a step's result: append tokens, find stops, count acceptance, release, report."""

from __future__ import annotations

from sgling.srt.core.step import StepOutput
from sgling.srt.managers.finish import FinishChecker
from sgling.srt.managers.io_struct import FinishReason, RequestLogprobs
from sgling.srt.managers.launched import Launched
from sgling.srt.managers.output import HostLogprobs, OutputStreamer
from sgling.srt.managers.request import Req, ReqStage
from sgling.srt.managers.resources import RequestResources
from sgling.srt.speculative.depth import DepthPolicy
from sgling.srt.speculative.stats import SpecStats


class ResultProcessor:
    """Applies results to requests in row order. A request that ended meanwhile is skipped: its tokens are dropped."""

    def __init__(self, resources: RequestResources, streamer: OutputStreamer, stats: SpecStats, depth: DepthPolicy):
        self._resources = resources
        self._streamer = streamer
        self._stats = stats
        self._depth = depth
        self._checkers: dict[Req, FinishChecker] = {}

    def register(self, req: Req, checker: FinishChecker) -> None:
        """Bind the stop rules of a new request."""
        self._checkers[req] = checker

    def process(self, launched: Launched) -> None:
        """Apply one result."""
        output = launched.result.wait()
        if launched.chunk is not None:
            self._process_prefill(launched, output)
        else:
            self._process_decode(launched, output)

    def _process_prefill(self, launched: Launched, output: StepOutput) -> None:
        req = launched.reqs[0]
        if launched.chunk.last:
            req.launched_steps -= 1
        if req.finished:
            return
        if output.prompt_logprobs is not None:
            self._add_prompt_logprobs(req, launched, output)
        if not launched.chunk.last:
            return
        if req.max_new_tokens == 0:
            self.finish(req, FinishReason(type="length", length=0))
            return
        self._commit(req, output.tokens[0].tolist()[:1], self._logprobs(launched, output), row=0)

    def _process_decode(self, launched: Launched, output: StepOutput) -> None:
        tokens, accept_lens = output.tokens.tolist(), output.accept_lens.tolist()
        logprobs = self._logprobs(launched, output)
        verified = self._verified_rows(launched, output)
        for i, req in enumerate(launched.reqs):
            req.launched_steps -= 1
            if req.finished:
                continue
            accepted = accept_lens[i]
            req.kv_committed_len += accepted
            self._count(req, accepted, verified[i])
            self._commit(req, tokens[i][:accepted], logprobs, row=i * launched.width)

    @staticmethod
    def _verified_rows(launched: Launched, output: StepOutput) -> list[int]:
        """Rows that were verified per request; books the confidences of a scheduled step."""
        if output.schedule is None:
            return [launched.width] * len(launched.reqs)
        for req, logits in zip(launched.reqs, output.schedule.confidence.numpy(), strict=True):
            req.depth.confidences.add(logits)
        return output.schedule.verify_lens.tolist()

    def _logprobs(self, launched: Launched, output: StepOutput) -> HostLogprobs | None:
        return HostLogprobs(output.logprobs, launched.logprobs.token_ids) if output.logprobs is not None else None

    def _count(self, req: Req, accepted: int, width: int) -> None:
        spec = req.spec
        spec.verify_ct += 1
        spec.correct_drafts += accepted - 1
        spec.proposed_drafts += width - 1
        if len(spec.accept_histogram) < width:
            spec.accept_histogram += [0] * (width - len(spec.accept_histogram))
        spec.accept_histogram[accepted - 1] += 1
        self._stats.add(accepted, width)
        self._depth.observe(req.depth, width, accepted)

    def _commit(self, req: Req, tokens: list[int], logprobs: HostLogprobs | None, row: int) -> None:
        """Append the tokens one by one until one of them ends the request."""
        checker = self._checkers[req]
        kept: list[int] = []
        entries: list[RequestLogprobs] = []
        reason = None
        for j, token in enumerate(tokens):
            kept.append(token)
            req.output_ids.append(token)
            if logprobs is not None and req.recv.return_logprob:
                entries.append(logprobs.entry(row + j, token, req))
            reason = checker.check(token, len(req.output_ids))
            if reason is not None:
                break
        self._stats.add_tokens(len(kept))
        self._streamer.add(req, kept, entries)
        if reason is not None:
            self.finish(req, reason)
        else:
            self._streamer.flush(req)

    def _add_prompt_logprobs(self, req: Req, launched: Launched, output: StepOutput) -> None:
        """Row i of the chunk predicts prompt token ``start + i + 1``; the last row of the prompt predicts output."""
        host = HostLogprobs(output.prompt_logprobs, launched.logprobs.token_ids)
        first = len(req.input_logprobs) + req.recv.logprob_start_len
        last = min(launched.chunk.end + 1, req.prompt_len)
        for row, position in enumerate(range(first, last)):
            entry = host.entry(row, req.input_ids[position], req)
            req.input_logprobs += entry.tokens
            req.input_top += entry.top
            req.input_extra += entry.token_ids

    def finish(self, req: Req, reason: FinishReason) -> None:
        """End a request: release what it owns and report. Idempotent."""
        if req.finished:
            return
        req.stage = ReqStage.FINISHED
        req.finished_reason = reason
        req.spec.depth_reason = self._depth.reason(req.depth)
        req.swapped = None
        self._checkers.pop(req, None)
        self._resources.release(req)
        self._streamer.flush(req)
