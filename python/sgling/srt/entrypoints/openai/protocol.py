"""Request bodies of the OpenAI routes. Everywhere null means "use the default", and unknown fields are ignored.

These models check types and shapes; ranges are checked by ``SamplingParams``, limits of the model by the tokenizer
manager. Numbers are strict: ``true`` and ``"3"`` are no numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    WrapValidator,
    field_validator,
    model_validator,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _integer(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be an integer")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number")
    return value


def _keep_raw(value: Any, check: Any) -> Any:
    check(value)
    return value


Int = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number)]


class ApiModel(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(ApiModel):
    """``include_usage`` None: the server's ``--stream-response-default-include-usage`` decides."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool = False


class JsonSchemaFormat(ApiModel):
    """The schema of a ``json_schema`` response format."""

    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(ApiModel):
    """``type`` other than text asks for structured output."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema needs a schema: {'json_schema': {'name': ..., 'schema': {...}}}")
        return self


class GenerationRequest(ApiModel):
    """Fields that completions and chat share. Sampling fields left at None take the route's default."""

    model: str | None = None
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    rid: str | list[str] | None = None
    user: str | None = None

    n: Int = 1
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: StrictBool | None = None
    no_stop_trim: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    logit_bias: dict[str, Number] | None = None

    response_format: ResponseFormat | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    return_token_ids: StrictBool = False
    speculative: dict[str, Any] | None = None
    return_spec_tokens_details: StrictBool = False
    return_cached_tokens_details: StrictBool = False
    return_meta_info: StrictBool = False

    @field_validator("n")
    @classmethod
    def _some_choices(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"must be at least 1, got {value}")
        return value


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``. ``best_of`` is accepted and has no effect (upstream's behaviour)."""

    prompt: str | list[str] | list[Int] | list[list[Int]]
    max_tokens: Int = 16
    echo: StrictBool = False
    logprobs: Int | None = None
    suffix: str | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_of_four_forms(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and (_all_of(value, str) or _ids_or_rows(value))):
            return value
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")

    @model_validator(mode="after")
    def _ranges(self) -> CompletionRequest:
        if self.max_tokens <= 0:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be at least 0, got {self.logprobs}")
        if self.suffix:
            raise ValueError("suffix is not supported")
        return self


class ContentPart(ApiModel):
    """One part of a message's content; only text is understood."""

    type: str
    text: str = ""
    refusal: str = ""


class FunctionCall(ApiModel):
    """A call in the history; ``arguments`` is JSON text, or already an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(ApiModel):
    """A tool call of an assistant message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(ApiModel):
    """One message; roles are case-insensitive."""

    role: Literal[ROLES]
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _lower_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value


class FunctionTool(ApiModel):
    """A function the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(ApiModel):
    """An offered tool."""

    type: Literal["function"] = "function"
    function: FunctionTool


class NamedFunction(ApiModel):
    """Name inside a named tool choice."""

    name: str


class NamedToolChoice(ApiModel):
    """``tool_choice`` that forces one function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ReasoningOptions(ApiModel):
    """``reasoning`` object: another spelling of ``reasoning_effort`` and of switching thinking."""

    effort: Literal[REASONING_EFFORTS] | None = None
    enabled: StrictBool | None = None


class ChatCompletionRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``. ``input_ids`` replaces ``messages`` by a tokenised prompt."""

    messages: list[ChatMessage] = []
    input_ids: list[Int] | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: StrictBool = False
    top_logprobs: Int | None = None
    tools: Annotated[list[Tool], WrapValidator(_keep_raw)] = []  # checked, but kept as sent: templates print them
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice = "auto"
    parallel_tool_calls: StrictBool = True
    reasoning_effort: Literal[REASONING_EFFORTS] | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    separate_reasoning: StrictBool = True
    stream_reasoning: StrictBool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False

    @model_validator(mode="after")
    def _ranges(self) -> ChatCompletionRequest:
        if not self.messages and self.input_ids is None:
            raise ValueError("messages must not be empty")
        for name in ("max_tokens", "max_completion_tokens", "top_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs ({self.top_logprobs}) needs logprobs: true")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """Output budget, tokens; None: until the context is full."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _all_of(values: list, kind: type) -> bool:
    return bool(values) and all(isinstance(value, kind) for value in values)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids_or_rows(values: list) -> bool:
    """A list of ids (the empty list too), or a list of such lists."""
    if _all_of(values, list):
        return all(_is_id(value) for row in values for value in row)
    return all(map(_is_id, values))


class SeparateReasoningRequest(ApiModel):
    """Body of ``/separate_reasoning``."""

    text: str
    reasoning_parser: str = "ling3"


class ParseFunctionCallRequest(ApiModel):
    """Body of ``/parse_function_call``."""

    text: str
    tools: Annotated[list[Tool], WrapValidator(_keep_raw)] = []
    tool_call_parser: str = "ling3"
