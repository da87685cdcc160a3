"""``/start_profile`` and ``/stop_profile``: see :mod:`sgling.srt.managers.profiler`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from sgling.srt.entrypoints.native_routes import manager_of
from sgling.srt.entrypoints.request_body import read_json_object
from sgling.srt.managers.profile_req import start_request

router = APIRouter()


@router.api_route("/start_profile", methods=["GET", "POST"])
async def start_profile(request: Request) -> Response:
    """Start a recording; 400 when one is running or a field is wrong."""
    body = await read_json_object(request) if await request.body() else {}
    answer = await manager_of(request).start_profile(start_request(body))
    return PlainTextResponse(f"{answer.message}\n", 200 if answer.success else 400)


@router.api_route("/stop_profile", methods=["GET", "POST"])
async def stop_profile(request: Request) -> Response:
    """Stop the recording and name rank 0's files, one a line; 400 when there is none."""
    answer = await manager_of(request).stop_profile()
    return PlainTextResponse("\n".join([answer.message, *answer.files, ""]), 200 if answer.success else 400)
