"""Typed tool arguments: from the raw text between argument tags to JSON, guided by the tool's JSON schema.

Text of a parameter declared ``string`` is taken raw, so ``3`` stays ``"3"``. Other types are read as JSON, then as JSON
after unescaping, then as a Python literal; what is none of these stays a string. Undeclared ones are guessed alike.
"""

from __future__ import annotations

import ast
import json
from typing import Any

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
MAX_REF_DEPTH = 8
LITERAL_STARTS = tuple("[({'\"+-.0123456789TFN")
_FAILED = object()


def json_type(value: Any) -> str:
    """JSON schema type name of a decoded JSON value."""
    return "null" if value is None else JSON_TYPES[type(value)]


def declared_types(schema: Any, root: dict[str, Any], depth: int = 0) -> frozenset[str]:
    """Type names a schema allows; empty when it says nothing. Follows local ``$ref``, ``anyOf``/``oneOf``, ``enum``."""
    if not isinstance(schema, dict) or depth > MAX_REF_DEPTH:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return declared_types(_resolve(reference, root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(name for name in declared if isinstance(name, str))
    choices = [option for key in ("anyOf", "oneOf") for option in schema.get(key) or ()]
    if choices:
        return frozenset().union(*(declared_types(option, root, depth + 1) for option in choices))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return frozenset(json_type(value) for value in values)


def value_to_json(text: str, types: frozenset[str]) -> str:
    """JSON text of one argument value; ``types`` are the declared types, empty when unknown."""
    if types == {"string"}:
        return _dump(text)
    value = _decode(text)
    if value is _FAILED:
        return _dump(text)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    if "string" in types and not _fits(value, types):
        return _dump(text)
    return _dump(value)


def escape_json(text: str) -> str:
    """A piece of a JSON string without its quotes; pieces of a text may be escaped one by one."""
    return _dump(text)[1:-1]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _fits(value: Any, types: frozenset[str]) -> bool:
    """Whether a decoded value is of a declared type other than string (a quoted string is not unquoted then)."""
    name = json_type(value)
    return name != "string" and (name in types or (name == "integer" and "number" in types))


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    """Target of a local JSON pointer (``#/$defs/Unit``); None when it leads nowhere."""
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _decode(text: str) -> Any:
    """JSON, JSON after unescaping, or a Python literal that JSON can hold; ``_FAILED`` if it is none of them."""
    for read in (_read_json, _read_escaped_json, _read_literal):
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return _FAILED


def _read_json(text: str) -> Any:
    value = json.loads(text, parse_constant=_reject_constant)
    json.dumps(value, allow_nan=False)  # 1e999 decodes to infinity
    return value


def _read_escaped_json(text: str) -> Any:
    if "\\" not in text:
        raise ValueError("nothing to unescape")
    return _read_json(json.loads(f'"{text}"', strict=False))


def _read_literal(text: str) -> Any:
    text = text.strip()
    if text[:1] not in LITERAL_STARTS:  # ordinary text is not worth a compiler run (nor its warnings)
        raise ValueError("no literal")
    value = ast.literal_eval(text)
    return json.loads(json.dumps(value, allow_nan=False))  # tuples become lists; sets and bytes are refused
