"""Prepares a client request: tokenises, checks against the limits, makes scheduler requests and answer builders."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.managers.detokenizer import IncrementalDetokenizer
from sgling.srt.managers.generate_req import GenerateReqInput, RequestError, RequestItem
from sgling.srt.managers.io_struct import SchedulerReady, TokenizedGenerateReqInput
from sgling.srt.managers.request_validator import (
    RequestLimits,
    context_reserve,
    read_params,
    refuse_hopeless,
    tokenized_request,
)
from sgling.srt.managers.response import ResponseBuilder, ResponseOptions
from sgling.srt.managers.text_codec import TextCodec
from sgling.srt.sampling.sampling_params import SamplingParams

THREAD_TEXT_LEN = 20_000  # characters; more are tokenised in a thread, so that streams go on meanwhile


class Prepared(NamedTuple):
    """One completion, checked and ready to be sent."""

    item: RequestItem
    request: TokenizedGenerateReqInput
    builder: ResponseBuilder


class RequestPreparer:
    """Everything between a checked body and the scheduler that needs the tokenizer or the limits."""

    def __init__(self, server_args: ServerArgs, model_config: ModelConfig, codec: TextCodec | None):
        self._args = server_args
        self._vocab_size = model_config.vocab_size
        self._codec = codec
        self._limits: RequestLimits | None = None

    def bind(self, info: SchedulerReady) -> None:
        """Take the limits of a scheduler that has become ready."""
        reserve = context_reserve(self._args.spec)
        width = self._args.spec.width
        self._limits = RequestLimits(self._vocab_size, info.context_len, info.max_req_input_len, reserve, width)

    def warm_up_body(self, text: str, max_new_tokens: int) -> dict:
        """A greedy native request that any server can serve: as much of text and answer as its limits leave room."""
        limits = self._limits
        ids = [0, 1, 2] if self._codec is None else self._codec.encode(text)
        ids = ids[: limits.longest_prompt]
        room = limits.context_len - limits.reserve - len(ids)
        params = {"temperature": 0.0, "max_new_tokens": min(max_new_tokens, room)}
        return {"input_ids": ids, "sampling_params": params}

    async def prepare(self, obj: GenerateReqInput) -> list[Prepared]:
        """All completions of a request, prompt-major; raises :class:`RequestError` when one of them is refused."""
        items = obj.items(self._read_params)
        prompts = await self._tokenize(items)
        prepared = []
        for item, ids in zip(items, prompts, strict=True):
            request = tokenized_request(item, ids, obj.stream, self._limits)
            prepared.append(Prepared(item, request, self._builder(obj, item, request, len(items))))
        return prepared

    def _read_params(self, entry: dict | SamplingParams) -> SamplingParams:
        return read_params(entry, self._args.preferred_sampling_params, self._codec, self._vocab_size)

    async def _tokenize(self, items: list[RequestItem]) -> list[list[int]]:
        """Token ids of every item; the choices of one prompt share a list. Ids win over text."""
        texts = list(dict.fromkeys(item.text for item in items if item.input_ids is None))
        for text in texts if self._codec is not None else ():
            refuse_hopeless(text, self._codec, self._limits)
        known = dict(zip(texts, await self.encode(texts), strict=True))
        return [known[item.text] if item.input_ids is None else item.input_ids for item in items]

    async def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text; raises :class:`RequestError` without a tokenizer or for invalid Unicode."""
        if not texts:
            return []
        if self._codec is None:
            raise RequestError("text needs a tokenizer and this server has none; send input_ids")
        try:
            if sum(map(len, texts)) < THREAD_TEXT_LEN:
                return self._codec.encode_all(texts)
            return await asyncio.to_thread(self._codec.encode_all, texts)
        except UnicodeEncodeError as error:
            raise RequestError("text is not valid Unicode (it holds a lone surrogate)") from error

    def _builder(
        self, obj: GenerateReqInput, item: RequestItem, request: TokenizedGenerateReqInput, count: int
    ) -> ResponseBuilder:
        options = ResponseOptions(
            rid=item.rid,
            index=item.index if count > 1 or obj.batch_size is not None else None,
            return_logprob=item.return_logprob,
            top_logprobs=request.top_logprobs_num > 0,
            token_ids_logprobs=bool(request.token_ids_logprob),
            logprob_text=obj.return_text_in_logprobs,
            reasoning_end_ids=frozenset(obj.reasoning_end_ids),
            prompt_token_ids=request.input_ids if obj.return_prompt_token_ids else None,
            speculative=self._args.spec.enabled,
        )
        detokenizer = None
        if self._codec is not None:
            detokenizer = IncrementalDetokenizer(self._codec, item.sampling_params, hold_back=obj.stream)
        return ResponseBuilder(options, self._codec, detokenizer, time.time())
