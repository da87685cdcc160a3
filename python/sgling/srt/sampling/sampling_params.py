"""Sampling parameters of one request: upstream's keys, defaults and ranges, with errors that name the field.

Life of a value: ``from_dict`` checks types (JSON body), ``normalize`` rewrites equivalent spellings (a tiny temperature
or ``top_k = 1`` is greedy), ``verify`` checks ranges. Code behind ``verify`` may rely on finite, in-range numbers.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from sgling.srt.sampling.stop_regex import compile_stop_regex

GREEDY_TEMPERATURE = 1e-6  # temperatures below are greedy
MIN_REPETITION_PENALTY = 1e-6  # logit / penalty stays finite in fp32
MAX_TEMPERATURE = 1e9  # logits / temperature stays a normal fp32 number
MAX_LOGIT_BIAS = 1e9  # logit + bias stays finite in fp32
MAX_STOPS = 32
MAX_CHOICES = 1024  # n; each choice is a request of its own
DEFAULT_MAX_NEW_TOKENS = 128  # of native bodies; chat passes None (until the context is full)
CONSTRAINT_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class SamplingParamsError(ValueError):
    """A sampling parameter that cannot be served; the message names the field and the value (HTTP 400)."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class SamplingParams(msgspec.Struct):
    """How one request is sampled and when it stops.

    ``temperature`` 0 is greedy; ``top_k`` -1 is off; ``max_new_tokens`` None means until the context is full.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] = {}
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    beam_width: int | None = None

    @classmethod
    def from_dict(cls, body: Any, default_max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS) -> SamplingParams:
        """Read the ``sampling_params`` object of a native body; null means default, unknown keys are errors.

        ``default_max_new_tokens`` is used when the body gives none. Raises :class:`SamplingParamsError`.
        """
        if not isinstance(body, dict):
            raise SamplingParamsError("sampling_params", f"sampling_params must be an object, got {_show(body)}")
        values: dict[str, Any] = {"max_new_tokens": default_max_new_tokens}
        for name, value in body.items():
            reader = _READERS.get(name)
            if reader is None:
                raise SamplingParamsError(str(name), f"unknown sampling parameter {_show(name)}")
            if value is not None:
                values[name] = reader(name, value)
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        """Whether the arg-max is taken without noise (after :meth:`normalize`)."""
        return self.temperature == 0.0

    def normalize(self, tokenizer: Any | None) -> None:
        """Rewrite equivalent spellings in place, so that equal behaviour is equal data.

        Greedy requests get temperature 0 and neutral filters. Without a tokenizer there is no text to match, so stop
        strings are refused rather than ignored.
        """
        if 0.0 <= self.temperature < GREEDY_TEMPERATURE or self.top_k == 1:
            _check_filters(self)  # the filters are about to be reset: a bad one must not be hidden
            self.temperature, self.top_k, self.top_p, self.min_p = 0.0, -1, 1.0, 0.0
        if len(self.stop) <= MAX_STOPS:  # more are refused by verify, repeats or not
            self.stop = list(dict.fromkeys(self.stop))
        self.stop_token_ids = sorted(set(self.stop_token_ids))
        for name in ("stop", "stop_regex"):
            if tokenizer is None and getattr(self, name):
                raise SamplingParamsError(name, f"{name} needs a tokenizer, got {_show(getattr(self, name))}")

    def verify(self, vocab_size: int) -> None:
        """Check every range; raise :class:`SamplingParamsError` naming the field and the value."""
        _check_filters(self)
        _check_penalties(self)
        _check_lengths(self)
        _check_stops(self, vocab_size)
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id, vocab_size)
            _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        for name in CONSTRAINT_FIELDS:
            if getattr(self, name) is not None:
                raise SamplingParamsError(name, f"{name}: structured output is not built yet")
        if self.beam_width not in (None, 1):
            raise SamplingParamsError("beam_width", f"beam_width: beam search is not built, got {self.beam_width}")


def _show(value: Any) -> str:
    """Short repr for error messages."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fail(name: str, rule: str, value: Any) -> None:
    raise SamplingParamsError(name, f"{name} must be {rule}, got {_show(value)}")


def _check_range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    """``low <= value <= high`` (``low <`` when ``open_low``), written so that NaN fails."""
    if not (low < value if open_low else low <= value) or not value <= high:
        _fail(name, f"in {'(' if open_low else '['}{low:g}, {high:g}]", value)


def _check_filters(params: SamplingParams) -> None:
    _check_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _check_range("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _check_range("min_p", params.min_p, 0.0, 1.0)
    if params.top_k != -1 and not 1 <= params.top_k <= INT64_MAX:
        _fail("top_k", "-1 (off) or at least 1", params.top_k)


def _check_penalties(params: SamplingParams) -> None:
    _check_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, 2.0)


def _check_lengths(params: SamplingParams) -> None:
    """Token budgets, number of choices, seed."""
    limit = params.max_new_tokens
    if limit is not None and not 0 <= limit <= INT64_MAX:
        _fail("max_new_tokens", "at least 0", limit)
    if not 0 <= params.min_new_tokens <= INT64_MAX:
        _fail("min_new_tokens", "at least 0", params.min_new_tokens)
    if limit is not None and params.min_new_tokens > limit:
        _fail("min_new_tokens", f"at most max_new_tokens ({limit})", params.min_new_tokens)
    _check_range("n", params.n, 1, MAX_CHOICES)
    if params.stream_interval is not None and not 1 <= params.stream_interval <= INT64_MAX:
        _fail("stream_interval", "at least 1", params.stream_interval)
    if params.sampling_seed is not None and not INT64_MIN <= params.sampling_seed <= INT64_MAX:
        _fail("sampling_seed", "a 64-bit signed integer", params.sampling_seed)


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    """Stop strings, regular expressions and token ids."""
    for name in ("stop", "stop_regex"):
        items = getattr(params, name)
        if len(items) > MAX_STOPS:
            raise SamplingParamsError(name, f"{name} holds {len(items)} entries, at most {MAX_STOPS} are allowed")
        if "" in items:  # an empty string matches everywhere
            _fail(name, "non-empty strings", items)
    for pattern in params.stop_regex:
        try:
            compile_stop_regex(pattern)
        except re.error as error:
            raise SamplingParamsError("stop_regex", f"stop_regex {_show(pattern)} is invalid: {error}") from error
    for token_id in params.stop_token_ids:
        _check_token_id("stop_token_ids", token_id, vocab_size)


def _check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise SamplingParamsError(name, f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})")


def _read_int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(name, "an integer", value)
    if not INT64_MIN <= value <= INT64_MAX:
        _fail(name, "a 64-bit signed integer", value)
    return value


def _read_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail(name, "a number", value)
    if not -INT64_MAX <= value <= INT64_MAX or not math.isfinite(value):
        _fail(name, "a finite number", value)
    return float(value)


def _read_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _fail(name, "a boolean", value)
    return value


def _read_str(name: str, value: Any) -> str:
    if not isinstance(value, str):
        _fail(name, "a string", value)
    return value


def _read_strings(name: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        _fail(name, "a string or a list of strings", value)
    return list(items)


def _read_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        _fail(name, "a list of token ids", value)
    return [_read_int(name, item) for item in value]


def _read_bias(name: str, value: Any) -> dict[int, float]:
    """Keys are token ids, as integers or (JSON) decimal strings."""
    if not isinstance(value, dict):
        _fail(name, "an object {token id: bias}", value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and re.fullmatch(r"-?[0-9]{1,18}", key):
            key = int(key)
        biases[_read_int(name, key)] = _read_float(name, bias)
    return biases


def _read_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail(name, "an object", value)
    return value


_READERS = {
    **dict.fromkeys(
        ("max_new_tokens", "top_k", "min_new_tokens", "n", "sampling_seed", "stream_interval", "beam_width"), _read_int
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"), _read_float
    ),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), _read_bool),
    **dict.fromkeys(CONSTRAINT_FIELDS, _read_str),
    **dict.fromkeys(("stop", "stop_regex"), _read_strings),
    "stop_token_ids": _read_ids,
    "logit_bias": _read_bias,
    "custom_params": _read_object,
}
