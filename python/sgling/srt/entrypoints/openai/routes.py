"""Routes of the OpenAI surface."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response

from sgling.srt.entrypoints.errors import json_response
from sgling.srt.entrypoints.openai.chat import ChatService
from sgling.srt.entrypoints.openai.completions import CompletionService
from sgling.srt.entrypoints.openai.context import ServingContext
from sgling.srt.entrypoints.openai.errors import schema_error
from sgling.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ParseFunctionCallRequest,
    SeparateReasoningRequest,
)
from sgling.srt.entrypoints.openai.schema import Model, read_body
from sgling.srt.entrypoints.openai.sse import primed_stream
from sgling.srt.entrypoints.openai.tools import check_schemas
from sgling.srt.entrypoints.streaming import until_disconnect
from sgling.srt.managers.tokenizer_manager import TokenizerManager
from sgling.srt.parser.reasoning_parser import split_reasoning
from sgling.srt.parser.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from sgling.srt.parser.tool_call_parser import parse_tool_calls

router = APIRouter()


class OpenAIServing(NamedTuple):
    """The services behind the routes; ``app.state.openai_serving``."""

    chat: ChatService
    completions: CompletionService


def install_openai(app: FastAPI, manager: TokenizerManager) -> None:
    """Add the routes to an application. Raises ValueError for a chat template that does not compile."""
    context = ServingContext.create(manager)
    app.state.openai_serving = OpenAIServing(ChatService(context), CompletionService(context))
    app.include_router(router)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Text completion."""
    return await _generate(request, CompletionRequest, request.app.state.openai_serving.completions)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Chat completion."""
    return await _generate(request, ChatCompletionRequest, request.app.state.openai_serving.chat)


@router.post("/separate_reasoning")
async def separate_reasoning(request: Request) -> Response:
    """Split a text into reasoning and answer."""
    body = await read_body(request, SeparateReasoningRequest)
    _check_parser(body.reasoning_parser, REASONING_PARSERS)
    piece = split_reasoning(body.text)
    return json_response({"reasoning_text": piece.reasoning, "text": piece.content})


@router.post("/parse_function_call")
async def parse_function_call(request: Request) -> Response:
    """Find the tool calls in a text."""
    body = await read_body(request, ParseFunctionCallRequest)
    _check_parser(body.tool_call_parser, TOOL_CALL_PARSERS)
    check_schemas(body.tools)
    parsed = parse_tool_calls(body.text, body.tools)
    calls = [{"tool_index": i, "name": call.name, "parameters": call.arguments} for i, call in enumerate(parsed.calls)]
    return json_response({"normal_text": parsed.text, "calls": calls})


async def _generate(request: Request, model: type[Model], service: Any) -> Response:
    """Read the body and answer it, whole or as a stream."""
    body = await read_body(request, model)
    if body.stream:
        return await primed_stream(request, service.stream(body))
    return json_response(await until_disconnect(request, service.complete(body)))


def _check_parser(name: str, known: dict[str, Any]) -> None:
    if name not in known:
        raise schema_error(f"unknown parser {name!r}; known: {', '.join(known)}")
