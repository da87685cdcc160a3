"""The native generation request: JSON body or keyword arguments in, one item per completion out.

Everything that can be judged without a model is judged here (types, shapes, duplicate ids in the batch, fields that are
not built); limits of the model and of the server are :mod:`sgling.srt.managers.request_validator`'s.
"""

from __future__ import annotations

import reprlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sgling.srt.sampling.sampling_params import SamplingParams


class RequestError(Exception):
    """A request that is refused or has failed.

    Attributes:
        message: text for the client.
        status_code: HTTP status.
        err_type: the ``type`` of OpenAI error bodies.
        plain: whether ``/generate`` sends the message as a bare string (unknown sampling key).
    """

    def __init__(self, message: str, status_code: int = 400, err_type: str = "BadRequestError", plain: bool = False):
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.err_type = err_type
        self.plain = plain


class RequestItem(NamedTuple):
    """One completion of a request: prompt ``index // n``, choice ``index % n``.

    ``max_new_tokens_given``: the client asked for that many (a default beyond the context is clipped, not refused).
    """

    index: int
    rid: str
    group_rid: str
    text: str | None
    input_ids: list[int] | None
    sampling_params: SamplingParams
    max_new_tokens_given: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int]
    speculative: int | None


# Fields of upstream that are not built: accepted at a default, refused otherwise.
UNSUPPORTED_FIELDS = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "modalities",
    "return_hidden_states",
    "return_routed_experts",
    "lora_path",
    "lora_id",
    "session_params",
    "session_id",
    "priority",
    "custom_logit_processor",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "routed_dp_rank",
)


@dataclass
class GenerateReqInput:
    """Body of ``/generate``; null means the default everywhere.

    ``sampling_params`` entries are dicts (checked here) or ready :class:`SamplingParams` (from OpenAI routes).
    ``speculative`` narrows this request's verify steps (``enabled``, ``max_width``); it never changes the output.
    ``reasoning_end_ids`` is internal: the completion counts as reasoning until one of these ids (empty: none of it).
    """

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict | SamplingParams | list[dict] | list[SamplingParams] | None = None
    stream: bool = False
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int]] | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    reasoning_end_ids: tuple[int, ...] = ()
    speculative: dict | list[dict] | None = None

    @classmethod
    def from_json(cls, body: Any) -> GenerateReqInput:
        """Read a decoded JSON body; unknown top-level fields are ignored, wrong types raise :class:`RequestError`."""
        if not isinstance(body, dict):
            raise RequestError(f"The request body must be a JSON object, got {show(body)}")
        for name in UNSUPPORTED_FIELDS:
            if body.get(name) not in (None, False, [], {}, ""):
                raise RequestError(f"{name} is not supported, got {show(body[name])}")
        known = {field.name for field in fields(cls)} - {"reasoning_end_ids"}
        obj = cls(**{name: value for name, value in body.items() if name in known and value is not None})
        obj.check()
        return obj

    @property
    def batch_size(self) -> int | None:
        """Number of prompts when the request is a batch, else None. ``text`` decides when both prompts are given."""
        if self.text is not None:
            return len(self.text) if isinstance(self.text, list) else None
        ids = self.input_ids
        return len(ids) if ids and isinstance(ids[0], list) else None

    def check(self) -> None:
        """Check types and shapes; raise :class:`RequestError` naming the field and the value."""
        for name in ("stream", "return_text_in_logprobs", "return_prompt_token_ids"):
            _require(isinstance(getattr(self, name), bool), name, "a boolean", getattr(self, name))
        if self.text is None and self.input_ids is None:
            raise RequestError("Either text or input_ids must be given")
        _check_text(self.text)
        _check_ids(self.input_ids)
        size = self.batch_size
        if size == 0:
            raise RequestError("The batch is empty")
        if self.input_ids is not None and self.text is not None:
            nested = bool(self.input_ids) and isinstance(self.input_ids[0], list)
            if (len(self.input_ids) if nested else None) != size:
                raise RequestError("text and input_ids must have the same batch shape")
        for name, reader in _ITEM_READERS.items():
            self._per_prompt(name, reader)
        if isinstance(self.rid, list) and len(set(self.rid)) != len(self.rid):
            raise RequestError(f"Duplicate request ids in the batch: {show(self.rid)}")

    def _per_prompt(self, name: str, reader: Any) -> list:
        """Values of a field for each prompt: a list of the batch's length, or one value for all."""
        value, count = getattr(self, name), self.batch_size or 1
        listed = isinstance(value, list)
        if name == "token_ids_logprob":
            listed = listed and bool(value) and isinstance(value[0], list)
        if not listed:
            return [reader(name, value)] * count
        if self.batch_size is None or len(value) != count:
            want = f"one value or a list of {count}" if self.batch_size else "a single value"
            raise RequestError(f"{name} must be {want}, got {show(value)}")
        return [reader(name, entry) for entry in value]

    def items(self, read_params: Callable[[dict | SamplingParams], SamplingParams]) -> list[RequestItem]:
        """One item per completion, prompt-major; call after :meth:`check`.

        ``read_params`` makes verified parameters of one entry of ``sampling_params`` (before ``n`` multiplies it).
        """
        entries = self._per_prompt("sampling_params", lambda name, value: {} if value is None else value)
        params = [read_params(entry) for entry in entries]
        given = [not isinstance(entry, dict) or entry.get("max_new_tokens") is not None for entry in entries]
        columns = {name: self._per_prompt(name, reader) for name, reader in _ITEM_READERS.items()}
        columns["max_new_tokens_given"] = given
        if len({entry.n for entry in params}) > 1:
            raise RequestError("n must be the same for every prompt of a batch")
        items: list[RequestItem] = []
        for i, param in enumerate(params):
            base = self._base_rid(i, columns["rid"][i])
            for j in range(param.n):
                items.append(self._item(len(items), base if param.n == 1 else f"{base}_{j}", i, j, param, columns))
        return items

    def _base_rid(self, i: int, rid: str | None) -> str:
        if rid is None:
            return uuid.uuid4().hex
        return rid if self.batch_size is None or isinstance(self.rid, list) else f"{rid}_{i}"

    def _item(
        self, index: int, rid: str, i: int, choice: int, param: SamplingParams, columns: Mapping[str, list]
    ) -> RequestItem:
        batch = self.batch_size is not None
        return RequestItem(
            index=index,
            rid=rid,
            group_rid=columns["rid"][i] or rid,
            text=self.text[i] if batch and self.text is not None else self.text,
            input_ids=self.input_ids[i] if batch and self.input_ids is not None else self.input_ids,
            sampling_params=_choice_params(param, choice),
            **{name: column[i] for name, column in columns.items() if name != "rid"},
        )


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 72
_SHORT.maxlist = _SHORT.maxdict = 12


def show(value: Any) -> str:
    """Short repr for error messages; cheap for huge values too."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_int(value: Any) -> bool:
    """Whether a JSON value is an integer (booleans are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, name: str, rule: str, value: Any) -> None:
    if not condition:
        raise RequestError(f"{name} must be {rule}, got {show(value)}")


def _check_text(text: Any) -> None:
    if text is None:
        return
    entries = text if isinstance(text, list) else [text]
    for entry in entries:
        _require(isinstance(entry, str), "text", "a string or a list of strings", entry)


def _check_ids(ids: Any) -> None:
    if ids is None:
        return
    _require(isinstance(ids, list), "input_ids", "a list of token ids or a list of such lists", ids)
    nested = bool(ids) and isinstance(ids[0], list)
    for row in ids if nested else [ids]:
        _require(isinstance(row, list), "input_ids", "a list of token ids or a list of such lists", row)
        for value in row:
            _require(is_int(value), "input_ids", "integers", value)


def _choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """Parameters of one choice: each gets its own copy with n = 1, and its own seed when one was given."""
    copy = SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__})
    if params.n > 1:
        copy.n = 1
    if params.sampling_seed is not None:
        copy.sampling_seed = (params.sampling_seed + choice + 2**63) % 2**64 - 2**63
    return copy


def _read_rid(name: str, value: Any) -> str | None:
    if value is not None:
        _require(isinstance(value, str) and 0 < len(value) <= 256, name, "a string of 1 to 256 characters", value)
    return value


def _read_bool(name: str, value: Any) -> bool:
    value = False if value is None else value
    _require(isinstance(value, bool), name, "a boolean", value)
    return value


def _read_start(name: str, value: Any) -> int:
    value = -1 if value is None else value
    _require(is_int(value) and value >= -1, name, "an integer of at least -1", value)
    return value


def _read_top(name: str, value: Any) -> int:
    value = 0 if value is None else value
    _require(is_int(value) and value >= 0, name, "an integer of at least 0", value)
    return value


def _read_id_list(name: str, value: Any) -> list[int]:
    value = [] if value is None else value
    _require(isinstance(value, list) and all(map(is_int, value)), name, "a list of token ids", value)
    return value


def _read_speculative(name: str, value: Any) -> int | None:
    """Widest verify step of ``{"enabled": bool, "max_width": int}``: 1 when not enabled, None = the server's."""
    if value is None:
        return None
    _require(isinstance(value, dict), name, "an object with enabled and max_width", value)
    unknown = sorted(set(value) - {"enabled", "max_width"})
    if unknown:
        raise RequestError(f"{name} has no {show(unknown[0])}; known are enabled and max_width")
    enabled, width = value.get("enabled", True), value.get("max_width")
    _require(isinstance(enabled, bool), f"{name}.enabled", "a boolean", enabled)
    _require(width is None or (is_int(width) and width >= 1), f"{name}.max_width", "an integer of at least 1", width)
    if enabled:
        return width
    _require(width in (None, 1), f"{name}.max_width", "1 or absent where enabled is false", width)
    return 1


_ITEM_READERS = {
    "rid": _read_rid,
    "return_logprob": _read_bool,
    "logprob_start_len": _read_start,
    "top_logprobs_num": _read_top,
    "token_ids_logprob": _read_id_list,
    "speculative": _read_speculative,
}
