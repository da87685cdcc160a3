"""Checks of the tools a chat request offers, and of its tool choice."""

from __future__ import annotations

from typing import Any

from sgling.srt.entrypoints.openai.errors import not_built, value_error
from sgling.srt.entrypoints.openai.protocol import ChatCompletionRequest, NamedToolChoice

SCHEMA_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
MAX_SCHEMA_DEPTH = 64


def active_tools(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """The tools the model may call, as the client wrote them; empty with ``tool_choice: none``.

    Raises ``RequestError`` (400) for a broken schema, for a choice of a tool that is not offered, and for choices that
    force a call: those need structured output.
    """
    names = [tool["function"]["name"] for tool in request.tools]
    check_schemas(request.tools)
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            raise value_error(f"tool_choice names {choice.function.name!r}, which is not among the tools")
        raise not_built(f"tool_choice {choice.function.name!r}")
    if choice == "required":
        if not names:
            raise value_error("tool_choice 'required' needs tools")
        if request.response_format is not None and request.response_format.type != "text":
            raise value_error("tool_choice 'required' cannot be combined with response_format")
        raise not_built("tool_choice 'required'")
    return [] if choice == "none" else request.tools


def check_schemas(tools: list[dict[str, Any]]) -> None:
    """Check the parameter schema of every tool."""
    for function in (tool["function"] for tool in tools):
        check_schema(function.get("parameters") or {}, f"tools: parameters of {function['name']!r}")


def check_schema(schema: Any, place: str, depth: int = 0) -> None:
    """Structural check of a JSON schema: keywords that are used have values of the right form (400 otherwise)."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict) or depth > MAX_SCHEMA_DEPTH:
        raise value_error(f"{place}: not a JSON schema")
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not all(isinstance(kind, str) and kind in SCHEMA_TYPES for kind in kinds):
        raise value_error(f"{place}: unknown type {schema['type']!r}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise value_error(f"{place}: required must be a list of names")
    if not isinstance(schema.get("enum", []), list):
        raise value_error(f"{place}: enum must be a list")
    for key in ("properties", "$defs", "definitions", "patternProperties"):
        members = schema.get(key, {})
        if not isinstance(members, dict):
            raise value_error(f"{place}: {key} must be an object")
        for name, member in members.items():
            check_schema(member, f"{place}.{name}", depth + 1)
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        members = schema.get(key, [])
        if not isinstance(members, list):
            raise value_error(f"{place}: {key} must be a list")
        for member in members:
            check_schema(member, f"{place}.{key}", depth + 1)
    for key in ("items", "additionalProperties", "not"):
        if key in schema:
            check_schema(schema[key], f"{place}.{key}", depth + 1)
