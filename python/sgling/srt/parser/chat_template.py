"""Chat templates: turn messages and tools into prompt text, byte for byte as ``transformers`` renders them.

Needs jinja2 only (no tokenizer, no web stack), so the server and the training-data generator share one implementation.
A model directory holds its template in ``chat_template.jinja`` or in ``tokenizer_config.json`` (``chat_template``:
text, or a list of named texts of which ``tool_use`` is taken when tools are given and ``default`` otherwise).
"""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING_KEYS = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # spellings of a message's reasoning; templates read [0]
SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
RESERVED_KWARGS = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)
_RENDER_ERRORS = (  # what a template raises when a conversation holds values it does not expect
    jinja2.exceptions.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
CONTINUE_MARK = "\ue000continue here\ue001"  # private-use characters: no message holds them


class ChatTemplateError(ValueError):
    """A conversation the template cannot render (HTTP 400), or a template that does not compile."""


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for training masks; transparent here."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The tag's body, as if the tag were not there."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` of templates; underscore names are refused, since templates come from model directories."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON with separators ", " and ": ", non-ASCII kept; jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(spec: str) -> str:
    return datetime.datetime.now().strftime(spec)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Sandbox with the filters, globals and whitespace rules that published chat templates rely on."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["namespace"] = _Namespace
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """A compiled chat template. ``variables`` are the special tokens a template may print (``bos_token`` ...)."""

    def __init__(self, source: str, variables: dict[str, str] | None = None, tool_source: str | None = None) -> None:
        self.source = source
        self.variables = dict(variables or {})
        try:
            self._default = _environment().from_string(source)
            self._with_tools = _environment().from_string(tool_source) if tool_source else self._default
        except jinja2.exceptions.TemplateError as error:
            raise ChatTemplateError(f"chat template does not compile: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path, variables: dict[str, str] | None = None) -> ChatTemplate:
        """Read one template file."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"), variables)
        except UnicodeDecodeError as error:
            raise ChatTemplateError(f"{path}: not a chat template: {error}") from error

    @classmethod
    def from_dir(cls, path: str | Path) -> ChatTemplate:
        """Read a model directory. Raises :class:`ChatTemplateError` when it holds no template."""
        directory = Path(path)
        config = _tokenizer_config(directory)
        variables = special_token_variables(config)
        template_file = directory / "chat_template.jinja"
        if template_file.is_file():
            return cls.from_file(template_file, variables)
        found = config.get("chat_template")
        if isinstance(found, str):
            return cls(found, variables)
        named = _named_templates(directory, found)
        if "default" not in named:
            raise ChatTemplateError(f"{directory} has no chat template (chat_template.jinja or tokenizer_config.json)")
        return cls(named["default"], variables, named.get("tool_use"))

    @classmethod
    def variables_of_dir(cls, path: str | Path) -> dict[str, str]:
        """Special tokens of a model directory, for a template that comes from elsewhere."""
        return special_token_variables(_tokenizer_config(Path(path)))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Prompt text of a conversation.

        ``messages``: dicts with ``role``, ``content`` and optionally ``reasoning_content``, ``tool_calls``
        (arguments as objects, see :func:`with_parsed_arguments`). ``continue_final_message`` leaves the last message
        open, ending the prompt right behind its text. ``kwargs`` reach the template (``enable_thinking`` ...).
        Raises :class:`ChatTemplateError` with the template's own message.
        """
        chat = [_visible_fields(message) for message in messages]
        if continue_final_message:
            chat = _mark_final_message(chat)
        template = self._with_tools if tools else self._default
        arguments = {**self.variables, **kwargs, "documents": kwargs.get("documents")}
        try:
            text = template.render(
                messages=chat,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **arguments,
            )
        except _RENDER_ERRORS as error:
            raise ChatTemplateError(f"chat template: {error}") from error
        if not continue_final_message:
            return text
        head, mark, _ = text.partition(CONTINUE_MARK)
        if not mark:
            raise ChatTemplateError("continue_final_message: the template does not render the final message's text")
        return head


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ChatTemplateError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ChatTemplateError(f"{path}: must hold a JSON object, holds {type(config).__name__}")
    return config


def _named_templates(directory: Path, entries: Any) -> dict[str, str]:
    """Templates of a list of named ones; none where there is no list."""
    if entries is None:
        return {}
    fields = ("name", "template")
    if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
        pairs = [tuple(entry.get(field) for field in fields) for entry in entries]
        if all(isinstance(text, str) for pair in pairs for text in pair):
            return dict(pairs)
    raise ChatTemplateError(f"{directory}/tokenizer_config.json: chat_template must be text or a list of named texts")


def special_token_variables(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Special tokens of a ``tokenizer_config.json``; entries are text or objects with ``content``."""
    found = {}
    for key in SPECIAL_TOKEN_KEYS:
        value = tokenizer_config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Copy of an assistant message whose tool-call arguments are objects: the OpenAI API carries them as JSON text.

    Raises :class:`ChatTemplateError` when the text is not a JSON object.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = []
    for call in calls:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ChatTemplateError(f"tool call arguments are not valid JSON: {error}") from error
        if not isinstance(arguments, dict | None):
            raise ChatTemplateError(f"tool call arguments must be a JSON object, got {type(arguments).__name__}")
        parsed.append({**call, "function": {**function, "arguments": arguments or {}}})
    return {**message, "tool_calls": parsed}


def _visible_fields(message: dict[str, Any]) -> dict[str, Any]:
    """What a template sees of a message: no null fields, reasoning under its standard name as well."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in REASONING_KEYS if key in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, REASONING_KEYS[0]: reasoning}


def _mark_final_message(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the mark to the text being continued: the content, or the reasoning of a message without content."""
    if not chat:
        raise ChatTemplateError("continue_final_message: there is no message to continue")
    last = dict(chat[-1])
    if not last.get("content") and last.get(REASONING_KEYS[0]):
        last[REASONING_KEYS[0]] += CONTINUE_MARK
    elif isinstance(last.get("content", ""), str):
        last["content"] = last.get("content", "") + CONTINUE_MARK
    else:
        raise ChatTemplateError("continue_final_message: the final message's content must be text")
    return [*chat[:-1], last]
