"""From an OpenAI request's fields to ``SamplingParams``."""

from __future__ import annotations

from typing import Any

from sgling.srt.entrypoints.openai.errors import not_built
from sgling.srt.entrypoints.openai.protocol import GenerationRequest
from sgling.srt.managers.generate_req import RequestError
from sgling.srt.sampling.sampling_params import SamplingParams, SamplingParamsError

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
)
RENAMED = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}


def sampling_params(request: GenerationRequest, max_new_tokens: int | None, defaults: dict[str, Any]) -> SamplingParams:
    """Sampling parameters of a request; what it leaves unset comes from ``defaults``. Raises ``RequestError`` (400)."""
    refuse_structured_output(request)
    given = {name: getattr(request, name) for name in SAME_NAME}
    given |= {native: getattr(request, name) for name, native in RENAMED.items()}
    given |= {"max_new_tokens": max_new_tokens}
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    try:
        return SamplingParams.from_dict(values, default_max_new_tokens=None)
    except SamplingParamsError as error:
        raise RequestError(str(error)) from error


def refuse_structured_output(request: GenerationRequest) -> None:
    """Structured output is refused (400), never ignored."""
    if request.response_format is not None and request.response_format.type != "text":
        raise not_built(f"response_format {request.response_format.type}")
    for name in ("json_schema", "regex", "ebnf"):
        if getattr(request, name) is not None:
            raise not_built(name)
