"""Parser names and their automatic choice by what the chat template contains.

One family is built (``ling3``); ``auto`` picks it when the template speaks its markup and picks no parser otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgling.srt.parser.reasoning_parser import ReasoningParser
from sgling.srt.parser.tool_call_parser import KEY_OPEN, VALUE_OPEN, ToolCallParser

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {"ling3": ReasoningParser}
TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {"ling3": ToolCallParser}

_LING_ROLES = ("<role>SYSTEM</role>", "<role>ASSISTANT</role>", "<|role_end|>")


def detect_reasoning_parser(template: str) -> str | None:
    """Name of the reasoning parser for a chat template's source, None when no known markup is in it."""
    return "ling3" if all(mark in template for mark in _LING_ROLES) else None


def detect_tool_call_parser(template: str) -> str | None:
    """Name of the tool call parser for a chat template's source: role and argument tags must both be in it."""
    return "ling3" if all(mark in template for mark in (*_LING_ROLES, KEY_OPEN, VALUE_OPEN)) else None


def resolve_reasoning_parser(name: str | None, template: str) -> str | None:
    """Resolve ``--reasoning-parser`` (None, ``auto`` or a name). Raises ValueError for an unknown name."""
    return _resolve(name, template, REASONING_PARSERS, detect_reasoning_parser, "reasoning parser")


def resolve_tool_call_parser(name: str | None, template: str) -> str | None:
    """Resolve ``--tool-call-parser`` (None, ``auto`` or a name). Raises ValueError for an unknown name."""
    return _resolve(name, template, TOOL_CALL_PARSERS, detect_tool_call_parser, "tool call parser")


def _resolve(
    name: str | None, template: str, known: dict[str, Any], detect: Callable[[str], str | None], what: str
) -> str | None:
    if name is None or name in known:
        return name
    if name == "auto":
        return detect(template)
    raise ValueError(f"unknown {what} {name!r}; known: auto, {', '.join(known)}")
