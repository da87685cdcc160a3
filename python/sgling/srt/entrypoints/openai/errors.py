"""Errors of the OpenAI routes. Before the first output they are HTTP errors (``entrypoints.errors`` makes the flat
body); inside a stream they are an event with an ``error`` object."""

from __future__ import annotations

from typing import Any

from sgling.srt.managers.generate_req import RequestError


def schema_error(message: str) -> RequestError:
    """The body is not of the route's schema (400)."""
    return RequestError(message, 400, "Bad Request")


def value_error(message: str) -> RequestError:
    """The body is well-formed but cannot be turned into a request (400)."""
    return RequestError(message, 400, "BadRequest")


def not_built(what: str) -> RequestError:
    """A feature of the API that this build does not have (400): never ignored silently."""
    return value_error(f"{what}: structured output is not built yet")


def stream_error(error: RequestError) -> dict[str, Any]:
    """Event of a failure inside a running stream."""
    body = {"object": "error", "message": error.message, "type": error.err_type, "param": None}
    return {"error": {**body, "code": error.status_code}}
