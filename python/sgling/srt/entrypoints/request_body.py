"""Reads JSON bodies by hand, so that every malformed body is a 400 with a readable message."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from sgling.srt.entrypoints.errors import BodyError
from sgling.srt.managers.generate_req import show

MAX_BODY = 2**28  # bytes


async def read_json(request: Request) -> Any:
    """The decoded JSON body; raises :class:`BodyError`.

    NaN and infinities pass: the field that holds one refuses it by name.
    """
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise BodyError(f"The content type must be application/json, got {show(content_type)}")
    raw = await _read_all(request)
    if not raw:
        raise BodyError("The request has no body")
    try:
        text = raw.decode("utf-8-sig")  # json.loads of bytes would guess UTF-16 and let surrogates through
        body = json.loads(text)
        if "\\ud" in text.lower():  # an escape that may be half of a surrogate pair: no valid text
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except UnicodeEncodeError:
        raise BodyError("The body holds text that is not valid Unicode (a lone surrogate)") from None
    except UnicodeDecodeError as error:
        raise BodyError(f"The body is not valid UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise BodyError("The body is nested too deeply") from None
    except ValueError as error:
        raise BodyError(f"The body is not valid JSON: {error}") from None


async def _read_all(request: Request) -> bytes:
    """The body; one that is too long is read to its end without being kept, so that its client hears the answer."""
    pieces, length = [], 0
    async for piece in request.stream():
        length += len(piece)
        if length <= MAX_BODY:
            pieces.append(piece)
        else:
            pieces.clear()
    if length > MAX_BODY:
        raise BodyError(f"The body has {length} bytes, at most {MAX_BODY} are read")
    return b"".join(pieces)


async def read_json_object(request: Request) -> dict:
    """The body, which must be a JSON object; raises :class:`BodyError`."""
    body = await read_json(request)
    if not isinstance(body, dict):
        raise BodyError(f"The body must be a JSON object, got {type(body).__name__}")
    return body
