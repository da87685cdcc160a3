"""Routes that act on the engine: flush its caches, abort requests."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from sgling.srt.entrypoints.native_routes import manager_of
from sgling.srt.entrypoints.request_body import read_json_object
from sgling.srt.entrypoints.streaming import until_disconnect
from sgling.srt.managers.generate_req import RequestError, show

router = APIRouter()


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(request: Request) -> Response:
    """Reset caches and statistics; 400 when requests are still running after ``?timeout=`` seconds."""
    text = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 <= timeout_s <= 3600:
        raise RequestError(f"timeout must be a number of seconds from 0 to 3600, got {show(text)}")
    success, message = await until_disconnect(request, manager_of(request).flush_cache(timeout_s))
    if success:
        return PlainTextResponse("Cache flushed.\n")
    return PlainTextResponse(f"Cache not flushed: {message}\n", 400)


@router.post("/abort_request")
async def abort_request(request: Request) -> Response:
    """Abort one request or all; 200 without a body, also for an unknown id."""
    body = await read_json_object(request)
    rid, abort_all = body.get("rid"), body.get("abort_all")
    if not isinstance(rid, str | None) or not isinstance(abort_all, bool | None):
        raise RequestError(f"rid must be a string and abort_all a boolean, got {show(body)}")
    if not rid and not abort_all:
        raise RequestError("Either rid or abort_all must be given")
    manager_of(request).abort_request(rid or "", bool(abort_all))
    return Response()
