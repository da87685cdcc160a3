"""``/v1/completions``: text or token prompts in, one choice per prompt and ``n`` out (prompt-major)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sgling.srt.entrypoints.openai.context import ResponseHead, ServingContext, new_rid
from sgling.srt.entrypoints.openai.logprobs import LogprobCursor, completion_logprobs, prompt_logprobs
from sgling.srt.entrypoints.openai.protocol import CompletionRequest
from sgling.srt.entrypoints.openai.sampling import sampling_params
from sgling.srt.entrypoints.openai.usage import UsageCounter
from sgling.srt.entrypoints.streaming import sse_event
from sgling.srt.managers.generate_req import GenerateReqInput
from sgling.srt.managers.response import WEIGHT_VERSION

KIND = "text_completion"


class CompletionService:
    """Serves completion requests; errors are ``RequestError``."""

    def __init__(self, context: ServingContext) -> None:
        self._context = context

    async def complete(self, request: CompletionRequest) -> dict[str, Any]:
        """The whole answer."""
        job = CompletionJob(self._context, request)
        answers = await self._context.manager.generate_once(job.native)
        choices = [job.choice(answer, final=True) for answer in answers]
        return job.head.body(
            choices, job.usage.total(), metadata={"weight_version": WEIGHT_VERSION}, sglext=job.extension()
        )

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[bytes, None]:
        """Events of a streamed answer, without ``[DONE]``."""
        job = CompletionJob(self._context, request)
        options = request.stream_options
        async with aclosing(self._context.manager.generate_request(job.native)) as answers:
            async for answer in answers:
                choice = job.choice(answer, final=False)
                if choice is None:
                    continue
                usage = job.usage.of(choice["index"]) if options.continuous_usage_stats else None
                yield sse_event(job.head.body([choice], usage))
        extension = job.extension()
        if extension is not None:
            yield sse_event(job.head.body([], None, sglext=extension))
        if self._context.include_usage(options.include_usage):
            yield sse_event(job.head.body([], job.usage.total()))


class CompletionJob:
    """State of one request: its native form, and how far each choice was sent."""

    def __init__(self, context: ServingContext, request: CompletionRequest) -> None:
        self._context = context
        self._request = request
        rid = request.rid or new_rid()
        self.head = ResponseHead.new(rid, KIND, context.model_name(request.model))
        self.usage = UsageCounter(request.n, context.cache_report)
        self.native = self._native(rid)
        self._sent_text: dict[int, int] = {}
        self._sent_ids: dict[int, int] = {}
        self._cursors: dict[int, LogprobCursor] = {}

    def _native(self, rid: str | list[str]) -> GenerateReqInput:
        request = self._request
        is_text = isinstance(request.prompt, str) or (request.prompt and isinstance(request.prompt[0], str))
        with_logprobs = request.logprobs is not None
        return GenerateReqInput(
            text=request.prompt if is_text else None,
            input_ids=None if is_text else request.prompt,
            sampling_params=self._per_prompt(
                lambda: sampling_params(request, request.max_tokens, self._context.base_defaults)
            ),
            stream=request.stream,
            rid=rid,
            return_logprob=with_logprobs,
            logprob_start_len=0 if with_logprobs and request.echo else -1,
            top_logprobs_num=request.logprobs or 0,
            return_text_in_logprobs=with_logprobs,
            return_prompt_token_ids=request.return_token_ids,
            speculative=request.speculative,
        )

    def _per_prompt(self, make: Any) -> Any:
        """Sampling parameters: an own copy per prompt of a batch, since the manager normalises them in place."""
        prompt = self._request.prompt
        is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
        return [make() for _ in prompt] if is_batch else make()

    def choice(self, answer: dict[str, Any], final: bool) -> dict[str, Any] | None:
        """The choice object of a native answer: what is new in it. None when a chunk would hold nothing.

        ``final``: one-shot answers are always given.
        """
        index, meta = answer.get("index", 0), answer["meta_info"]
        first = index not in self._sent_text
        self.usage.update(index, meta)
        text = answer["text"][self._sent_text.get(index, 0) :]
        self._sent_text[index] = max(len(answer["text"]), self._sent_text.get(index, 0))
        if first and self._request.echo:
            text = self._prompt_text(index) + text
        logprobs = self._logprobs(index, meta, first)
        reason = meta["finish_reason"]
        if not (final or text or logprobs or reason):
            return None
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if reason is None else reason["type"],
            "matched_stop": None if reason is None else reason.get("matched"),
        }
        return {**choice, **self._extras(index, answer, first, final)}

    def _extras(self, index: int, answer: dict[str, Any], first: bool, final: bool) -> dict[str, Any]:
        """Extension fields of a choice that were asked for."""
        found: dict[str, Any] = {}
        if self._request.return_token_ids:
            found["token_ids"] = answer["output_ids"][self._sent_ids.get(index, 0) :]
            self._sent_ids[index] = len(answer["output_ids"])
            if first:
                found["prompt_token_ids"] = answer["meta_info"].get("prompt_token_ids")
        if final and self._request.return_meta_info:
            found["meta_info"] = answer["meta_info"]
        return found

    def _logprobs(self, index: int, meta: dict[str, Any], first: bool) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        tokens, tops = self._cursors.setdefault(index, LogprobCursor()).take(meta)
        if first and self._request.echo:
            prompt_tokens, prompt_tops = prompt_logprobs(meta)
            tokens, tops = prompt_tokens + tokens, prompt_tops + tops
        return completion_logprobs(tokens, tops) if tokens else None

    def _prompt_text(self, index: int) -> str:
        """Text of the prompt behind a choice (``echo``)."""
        prompt = self._request.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], (str, list)):
            prompt = prompt[index // self._request.n]
        return prompt if isinstance(prompt, str) else self._context.decode(prompt)

    def extension(self) -> dict[str, Any] | None:
        """``sglext`` of the answer."""
        request = self._request
        return self.usage.extension(request.return_spec_tokens_details, request.return_cached_tokens_details)
