"""From a chat request's messages to prompt text."""

from __future__ import annotations

from typing import Any

from sgling.srt.entrypoints.openai.errors import value_error
from sgling.srt.entrypoints.openai.protocol import ChatCompletionRequest, ChatMessage, ContentPart
from sgling.srt.parser.chat_template import RESERVED_KWARGS, ChatTemplate, ChatTemplateError, with_parsed_arguments

TEMPLATE_ROLES = {"developer": "system", "function": "tool"}  # what templates call them


def render_prompt(
    template: ChatTemplate, request: ChatCompletionRequest, tools: list[dict[str, Any]], defaults: dict[str, Any]
) -> str:
    """Prompt text. ``defaults`` are the server's ``--default-chat-template-kwargs``. Errors are 400s."""
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise value_error("continue_final_message needs an assistant message at the end")
    try:
        return template.render(
            [with_parsed_arguments(template_message(message)) for message in request.messages],
            tools=tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **template_kwargs(request, defaults),
        )
    except ChatTemplateError as error:
        raise value_error(str(error)) from error


def template_kwargs(request: ChatCompletionRequest, defaults: dict[str, Any]) -> dict[str, Any]:
    """Extra template variables. The request's own ``chat_template_kwargs`` win over its effort, then the defaults."""
    for name in request.chat_template_kwargs:
        if name in RESERVED_KWARGS or not name.isidentifier():
            raise value_error(f"chat_template_kwargs: {name!r} cannot be set by a request")
    effort, enabled = request.reasoning_effort or request.reasoning.effort, request.reasoning.enabled
    switches: dict[str, Any] = {}
    if effort is not None:
        switches = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if enabled is not None:
        switches["enable_thinking"] = enabled and effort != "none"
    return {**defaults, **switches, **request.chat_template_kwargs}


def template_message(message: ChatMessage) -> dict[str, Any]:
    """The message as templates expect it: flat text, roles they know, reasoning under one name."""
    calls = [call.model_dump() for call in message.tool_calls or ()]
    fields = {
        "role": TEMPLATE_ROLES.get(message.role, message.role),
        "content": flat_text(message.content),
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {name: value for name, value in fields.items() if value is not None}


def flat_text(content: str | list[ContentPart] | None) -> str:
    """Text of a message's content; parts are joined as they are. Parts other than text are refused (400)."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "refusal"):
            raise value_error(f"content part of type {part.type!r} is not supported: the model reads text only")
    return "".join(part.text or part.refusal for part in content)
