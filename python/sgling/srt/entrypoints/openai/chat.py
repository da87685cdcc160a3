"""``/v1/chat/completions``: messages in, an assistant message per choice out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from sgling.srt.entrypoints.openai.chat_output import ChatOutput, OutputRules, finish_fields, parse_choice
from sgling.srt.entrypoints.openai.chat_prompt import render_prompt
from sgling.srt.entrypoints.openai.chat_stream import ChoiceStream, new_call_id
from sgling.srt.entrypoints.openai.context import ResponseHead, ServingContext, new_rid
from sgling.srt.entrypoints.openai.errors import value_error
from sgling.srt.entrypoints.openai.logprobs import LogprobCursor, chat_logprobs
from sgling.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sgling.srt.entrypoints.openai.sampling import sampling_params
from sgling.srt.entrypoints.openai.schema import parse_body
from sgling.srt.entrypoints.openai.tools import active_tools
from sgling.srt.entrypoints.openai.usage import UsageCounter
from sgling.srt.entrypoints.streaming import sse_event
from sgling.srt.managers.generate_req import GenerateReqInput
from sgling.srt.managers.response import WEIGHT_VERSION
from sgling.srt.parser.reasoning_parser import THINK_CLOSE, THINK_OPEN, TOOL_OPEN, prompt_opens_reasoning
from sgling.srt.parser.tool_call_parser import KEY_OPEN, TOOL_CLOSE, VALUE_OPEN

MAX_TAIL_IDS = 256  # tokens at the end of a tokenised prompt in which its last think tag is looked for


class ChatService:
    """Serves chat requests; errors are ``RequestError``."""

    def __init__(self, context: ServingContext) -> None:
        self._context = context

    async def complete(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """The whole answer."""
        job = ChatJob(self._context, request)
        answers = await self._context.manager.generate_once(job.native)
        choices = [job.choice(answer) for answer in answers]
        return job.head("chat.completion").body(
            choices, job.usage.total(), metadata={"weight_version": WEIGHT_VERSION}, sglext=job.extension()
        )

    async def stream(self, request: ChatCompletionRequest) -> AsyncGenerator[bytes, None]:
        """Events of a streamed answer, without ``[DONE]``."""
        job = ChatJob(self._context, request)
        head, options = job.head("chat.completion.chunk"), request.stream_options
        streams: dict[int, ChoiceStream] = {}
        async with aclosing(self._context.manager.generate_request(job.native)) as answers:
            async for answer in answers:
                index = answer.get("index", 0)
                if index not in streams:
                    streams[index] = ChoiceStream(index, job.output(), request, self._context.token_bytes)
                job.usage.update(index, answer["meta_info"])
                usage = job.usage.of(index) if options.continuous_usage_stats else None
                for choice in streams[index].choices(answer):
                    yield sse_event(head.body([choice], usage))
        extension = job.extension()
        if extension is not None:
            yield sse_event(head.body([], None, sglext=extension))
        if self._context.include_usage(options.include_usage):
            yield sse_event(head.body([], job.usage.total()))

    def prompt_of_body(self, body: dict[str, Any]) -> str:
        """The prompt that a body's messages render to (``/v1/tokenize``); raises ``RequestError`` (400)."""
        request = parse_body(body, ChatCompletionRequest)
        return _prompt_text(self._context, request, active_tools(request))


class ChatJob:
    """State of one request that all its choices share."""

    def __init__(self, context: ServingContext, request: ChatCompletionRequest) -> None:
        self._context = context
        self._request = request
        self._model = context.model_name(request.model)
        self._rid = request.rid or new_rid()
        self.usage = UsageCounter(request.n, context.cache_report)
        tools = active_tools(request)
        prompt = None if request.input_ids is not None else _prompt_text(context, request, tools)
        # Without a reasoning parser the model's thinking is plain output.
        tail = context.decode(request.input_ids[-MAX_TAIL_IDS:]) if prompt is None else prompt
        in_reasoning = context.reasoning_parser is not None and prompt_opens_reasoning(tail)
        self._rules = OutputRules.of(context, request, tools, in_reasoning)
        self.native = self._native(prompt, in_reasoning)

    def _native(self, prompt: str | None, in_reasoning: bool) -> GenerateReqInput:
        request, context = self._request, self._context
        params = sampling_params(request, request.max_new_tokens, context.chat_defaults)
        if request.skip_special_tokens is None and context.any_special(self._tags()):
            params.skip_special_tokens = False
        return GenerateReqInput(
            text=prompt,
            input_ids=request.input_ids,
            sampling_params=params,
            stream=request.stream,
            rid=self._rid,
            return_logprob=request.logprobs,
            top_logprobs_num=request.top_logprobs or 0,
            return_text_in_logprobs=request.logprobs,
            return_prompt_token_ids=request.return_token_ids,
            speculative=request.speculative,
            reasoning_end_ids=context.reasoning_end_ids() if in_reasoning else (),
        )

    def _tags(self) -> list[str]:
        """Tags the parsers of this request look for in the text."""
        found = [THINK_OPEN, THINK_CLOSE, TOOL_OPEN] if self._rules.reasoning_parser else []
        return found + ([TOOL_OPEN, TOOL_CLOSE, KEY_OPEN, VALUE_OPEN] if self._rules.tool_call_parser else [])

    def head(self, kind: str) -> ResponseHead:
        """Head of the answer."""
        return ResponseHead.new(self._rid, kind, self._model)

    def output(self) -> ChatOutput:
        """A reader for one choice."""
        return ChatOutput(self._rules)

    def choice(self, answer: dict[str, Any]) -> dict[str, Any]:
        """One-shot choice of a final native answer."""
        request, meta, index = self._request, answer["meta_info"], answer.get("index", 0)
        self.usage.update(index, meta)
        reason = meta["finish_reason"]
        output = self.output()
        parsed = parse_choice(output, answer["text"], aborted=reason["type"] == "abort")
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [_call_body(position, call) for position, call in enumerate(parsed.calls)]
        found = {"index": index, "message": message, "logprobs": None, **finish_fields(reason, bool(parsed.calls))}
        if request.logprobs:
            found["logprobs"] = chat_logprobs(*LogprobCursor().take(meta), self._context.token_bytes)
        if request.return_token_ids:
            found |= {"token_ids": answer["output_ids"], "prompt_token_ids": meta.get("prompt_token_ids")}
        if request.return_meta_info:
            found["meta_info"] = meta
        return found

    def extension(self) -> dict[str, Any] | None:
        """``sglext`` of the answer."""
        request = self._request
        return self.usage.extension(request.return_spec_tokens_details, request.return_cached_tokens_details)


def _call_body(position: int, call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(), "index": position, "type": "function", "function": function}


def _prompt_text(context: ServingContext, request: ChatCompletionRequest, tools: list[dict[str, Any]]) -> str:
    if context.template is None:
        raise value_error("the model has no chat template; start the server with --chat-template")
    defaults = context.manager.server_args.default_chat_template_kwargs or {}
    return render_prompt(context.template, request, tools, defaults)
