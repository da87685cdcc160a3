"""Native generation and tokenizer routes: ``/generate``, ``/tokenize``, ``/detokenize``."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sgling.srt.entrypoints.errors import json_response, native_error, stream_error
from sgling.srt.entrypoints.request_body import read_json_object
from sgling.srt.entrypoints.streaming import DONE_EVENT, EventStream, sse_event, until_disconnect
from sgling.srt.managers.generate_req import GenerateReqInput, RequestError, is_int, show
from sgling.srt.managers.response import one_or_list
from sgling.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)
router = APIRouter()


def manager_of(request: Request) -> TokenizerManager:
    """The server's tokenizer manager."""
    return request.app.state.tokenizer_manager


@router.api_route("/generate", methods=["POST", "PUT"])
async def generate(request: Request):
    """Native generation. A refused stream is HTTP 200 with an error event, as upstream answers it."""
    body = await read_json_object(request)
    manager = manager_of(request)
    try:
        obj = GenerateReqInput.from_json(body)
        if obj.stream:
            return EventStream(_events(manager, obj))
        answers = await until_disconnect(request, manager.generate_once(obj))
    except RequestError as error:
        return native_error(error)
    return json_response(one_or_list(answers))


async def _events(manager: TokenizerManager, obj: GenerateReqInput) -> AsyncGenerator[bytes, None]:
    """Events of a native stream."""
    deltas = DeltaView() if manager.server_args.incremental_streaming_output else None
    try:
        async with aclosing(manager.generate_request(obj)) as answers:
            async for answer in answers:
                yield sse_event(answer if deltas is None else deltas.reduce(answer))
    except RequestError as error:
        yield sse_event(stream_error(error))
    except Exception:
        logger.exception("A stream failed")
        yield sse_event(stream_error(RequestError("Internal server error", 500)))
    yield DONE_EVENT


class DeltaView:
    """Turns cumulative answers into increments (``--incremental-streaming-output``)."""

    def __init__(self):
        self._sent: dict[int, tuple[int, int]] = {}

    def reduce(self, answer: dict) -> dict:
        """The answer with only the text and ids that are new since the previous one of its index."""
        index = answer.get("index", 0)
        text_len, ids_len = self._sent.get(index, (0, 0))
        self._sent[index] = (len(answer["text"]), len(answer["output_ids"]))
        return {**answer, "text": answer["text"][text_len:], "output_ids": answer["output_ids"][ids_len:]}


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, of each prompt of a list, or of the prompt that messages render to."""
    body = await read_json_object(request)
    manager = manager_of(request)
    prompt = body.get("prompt")
    if prompt is None and body.get("messages") is not None:
        prompt = request.app.state.openai_serving.chat.prompt_of_body(body)
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(entry, str) for entry in prompts):
        raise RequestError(f"prompt must be a string or a list of strings, got {show(prompt)}")
    tokens = await manager.preparer.encode(prompts)
    counts = [len(entry) for entry in tokens]
    single = not isinstance(prompt, list)
    return json_response(
        {
            "tokens": tokens[0] if single else tokens,
            "count": counts[0] if single else counts,
            "max_model_len": manager.context_len,
        }
    )


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    """Text of a token list, or of each list of a list; unknown ids are empty text, as upstream answers them."""
    body = await read_json_object(request)
    codec = manager_of(request).codec
    if codec is None:
        raise RequestError("detokenize needs a tokenizer and this server has none")
    tokens, skip = body.get("tokens"), body.get("skip_special_tokens")
    skip = True if skip is None else skip
    if not isinstance(skip, bool):
        raise RequestError(f"skip_special_tokens must be a boolean, got {show(skip)}")
    if not isinstance(tokens, list):
        raise RequestError(f"tokens must be a list of token ids, got {show(tokens)}")
    nested = bool(tokens) and isinstance(tokens[0], list)
    texts = []
    for row in tokens if nested else [tokens]:
        if not isinstance(row, list) or not all(map(is_int, row)):
            raise RequestError(f"tokens must be a list of token ids, got {show(row)}")
        texts.append(codec.decode(row, skip))
    return json_response({"text": texts if nested else texts[0]})
