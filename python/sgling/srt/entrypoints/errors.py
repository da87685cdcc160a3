"""Error bodies of all routes, in upstream's shapes, and the exceptions that carry them through FastAPI."""

from __future__ import annotations

import logging

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from sgling.srt.managers.generate_req import RequestError

logger = logging.getLogger(__name__)

_STREAM_TYPES = {400: "invalid_request_error", 503: "service_unavailable"}
CLIENT_CLOSED_REQUEST = 499  # status of answers nobody reads


class BodyError(Exception):
    """A body that is no JSON object: 400 in the flat OpenAI form on every route."""


class ClientGone(Exception):
    """The client has closed its connection."""


def json_response(content, status_code: int = 200) -> Response:
    """A JSON answer; numbers JSON cannot express (infinite or NaN logprobs) become null."""
    return Response(msgspec.json.encode(content), status_code, media_type="application/json")


def flat_error(message: str, status_code: int, err_type: str) -> Response:
    """Error of OpenAI routes."""
    body = {"object": "error", "message": message, "type": err_type, "param": None, "code": status_code}
    return json_response(body, status_code)


def native_error(error: RequestError) -> Response:
    """Error of ``/generate`` before the answer has begun."""
    return json_response({"error": error.message if error.plain else {"message": error.message}}, error.status_code)


def stream_error(error: RequestError) -> dict:
    """Error inside a native stream."""
    code = error.status_code
    kind = _STREAM_TYPES.get(code, "internal_server_error")
    return {"error": {"message": error.message, "type": kind, "code": code, "retryable": code == 503}}


def client_gone() -> Response:
    """Closes a request whose client has left."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def install_error_handlers(app: FastAPI) -> None:
    """Every failure becomes a JSON body: never a bare 500, never FastAPI's 422."""

    @app.exception_handler(BodyError)
    async def _body(request: Request, error: BodyError) -> Response:
        return flat_error(str(error), 400, "Bad Request")

    @app.exception_handler(RequestError)
    async def _request(request: Request, error: RequestError) -> Response:
        return flat_error(error.message, error.status_code, error.err_type)

    @app.exception_handler(ClientGone)
    async def _gone(request: Request, error: ClientGone) -> Response:
        return client_gone()

    @app.exception_handler(ClientDisconnect)
    async def _disconnect(request: Request, error: ClientDisconnect) -> Response:
        return client_gone()

    @app.exception_handler(Exception)
    async def _other(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed: %r", request.method, request.url.path, error)
        return flat_error("Internal server error", 500, "InternalServerError")
