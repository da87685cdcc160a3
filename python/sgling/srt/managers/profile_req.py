"""Reads the body of ``/start_profile``: upstream's fields, all optional."""

from __future__ import annotations

import uuid
from typing import Any

from sgling.srt.managers.generate_req import RequestError, is_int, show
from sgling.srt.managers.io_struct import ProfileReq

ACTIVITIES = ("CPU", "GPU", "CUDA", "STEPS")  # STEPS is always recorded, the others ask for torch's profiler too

MAX_STEPS = 2**62  # what a message can carry


def start_request(body: dict[str, Any]) -> ProfileReq:
    """A start request; raises :class:`RequestError` naming the field. Unknown fields are ignored.

    ``profile_by_stage`` changes nothing: every step in the trace carries its stage.
    """
    request = ProfileReq(uuid.uuid4().hex)
    _set(request, body, "output_dir", lambda value: isinstance(value, str), "a directory")
    _set(request, body, "profile_prefix", lambda value: isinstance(value, str) and "/" not in value, "a file name part")
    _set(request, body, "start_step", lambda value: _is_count(value, 0), "an integer of at least 0")
    _set(request, body, "num_steps", lambda value: _is_count(value, 1), "an integer of at least 1")
    _set(request, body, "record_shapes", lambda value: isinstance(value, bool), "a boolean")
    _set(request, body, "with_stack", lambda value: isinstance(value, bool), "a boolean")
    known = f"a list of {', '.join(ACTIVITIES)}"
    _set(request, body, "activities", _are_activities, known)
    return request


def _is_count(value: Any, least: int) -> bool:
    return is_int(value) and least <= value <= MAX_STEPS


def _are_activities(value: Any) -> bool:
    return isinstance(value, list) and all(entry in ACTIVITIES for entry in value)


def _set(request: ProfileReq, body: dict[str, Any], name: str, holds, rule: str) -> None:
    value = body.get(name)
    if value is None:
        return
    if not holds(value):
        raise RequestError(f"{name} must be {rule}, got {show(value)}")
    setattr(request, name, value)


def stop_request() -> ProfileReq:
    """A stop request."""
    return ProfileReq(uuid.uuid4().hex, stop=True)
