"""Check a decoded body against its pydantic model; every fault is a 400 that names the field and the value."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from sgling.srt.entrypoints.openai.errors import schema_error
from sgling.srt.entrypoints.request_body import read_json_object
from sgling.srt.managers.generate_req import UNSUPPORTED_FIELDS, show

Model = TypeVar("Model", bound=BaseModel)

MAX_SHOWN_FAULTS = 3


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's JSON body as a ``model``."""
    return parse_body(await read_json_object(request), model)


def parse_body(body: dict[str, Any], model: type[Model]) -> Model:
    """Check a body, and refuse fields that ask for what is not built. Raises ``RequestError`` (400)."""
    for name in UNSUPPORTED_FIELDS:
        if body.get(name) not in (None, False, [], {}, ""):
            raise schema_error(f"{name} is not supported, got {show(body[name])}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise schema_error(_summary(error)) from error


def _summary(error: ValidationError) -> str:
    """The first few faults, each with its place; a field with alternatives reports each of them."""
    faults = []
    for fault in error.errors(include_url=False, include_context=False):
        text = fault["msg"].removeprefix("Value error, ")
        place = ".".join(str(part) for part in fault["loc"])
        if not place or fault["type"] == "missing" or ", got " in text:
            faults.append(f"{place}: {text}" if place else text)
        else:
            faults.append(f"{place}: {text}, got {show(fault['input'])}")
    more = len(faults) - MAX_SHOWN_FAULTS
    return "; ".join(faults[:MAX_SHOWN_FAULTS]) + (f"; and {more} more" if more > 0 else "")
