"""What the OpenAI services share: the tokenizer manager, the chat template, the parsers, the sampling defaults."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgling.srt.config.model_path import resolve_model_path
from sgling.srt.entrypoints.openai.errors import value_error
from sgling.srt.managers.tokenizer_manager import TokenizerManager
from sgling.srt.parser.chat_template import ChatTemplate, ChatTemplateError
from sgling.srt.parser.reasoning_parser import THINK_CLOSE, TOOL_OPEN
from sgling.srt.parser.registry import resolve_reasoning_parser, resolve_tool_call_parser

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingContext:
    """Built once per server, read by every request.

    Attributes:
        manager: runs the requests.
        template: None when the model has none; chat requests are then refused.
        reasoning_parser, tool_call_parser: names, or None when off.
        chat_defaults: sampling parameters of chat requests that leave them unset.
        base_defaults: the same for completions (``--preferred-sampling-params`` only).
    """

    manager: TokenizerManager
    template: ChatTemplate | None
    reasoning_parser: str | None
    tool_call_parser: str | None
    chat_defaults: dict[str, Any]
    base_defaults: dict[str, Any]

    @classmethod
    def create(cls, manager: TokenizerManager) -> ServingContext:
        """Read what the server's arguments name. Raises ValueError for a template that does not compile."""
        args = manager.server_args
        template = load_template(args)
        source = "" if template is None else template.source
        preferred = dict(args.preferred_sampling_params or {})
        from_model = manager.model_config.generation.values() if args.sampling_defaults == "model" else {}
        return cls(
            manager=manager,
            template=template,
            reasoning_parser=resolve_reasoning_parser(args.reasoning_parser, source),
            tool_call_parser=resolve_tool_call_parser(args.tool_call_parser, source),
            chat_defaults={**from_model, **preferred},
            base_defaults=preferred,
        )

    @property
    def cache_report(self) -> bool:
        """Whether usage shows cached prompt tokens."""
        return self.manager.server_args.enable_cache_report

    def model_name(self, asked: str | None) -> str:
        """The ``model`` of the answer: as asked. Any name is served, but ``name:adapter`` asks for LoRA: 400."""
        served = self.manager.server_args.served_model_name
        if asked is not None and ":" in asked and asked != served:
            raise value_error(f"model {asked!r} names an adapter, and LoRA is not supported")
        return served if asked is None else asked

    def include_usage(self, asked: bool | None) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.manager.server_args.stream_response_default_include_usage if asked is None else asked

    def reasoning_end_ids(self) -> tuple[int, ...]:
        """Ids that end thinking; empty when ``</think>`` is not one token (reasoning is not counted then)."""
        close = self._token_id(THINK_CLOSE)
        ids = (close, self._token_id(TOOL_OPEN))
        return () if close is None else tuple(token_id for token_id in ids if token_id is not None)

    def any_special(self, tags: Iterable[str]) -> bool:
        """Whether one of the tags is a special token, which decoding drops unless told otherwise."""
        codec = self.manager.codec
        return codec is not None and any(self._token_id(tag) in codec.special_ids for tag in tags)

    def decode(self, ids: list[int]) -> str:
        """Text of a tokenised prompt, special tokens included."""
        codec = self.manager.codec
        if codec is None:
            raise value_error("this server has no tokenizer, so it cannot show the text of a prompt")
        return codec.decode(ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token."""
        codec = self.manager.codec
        return b"" if codec is None else codec.token_bytes(token_id)

    def _token_id(self, text: str) -> int | None:
        codec = self.manager.codec
        return None if codec is None else codec.backend.token_to_id(text)


def load_template(args: Any) -> ChatTemplate | None:
    """``--chat-template`` (a file, or the template itself), else the tokenizer directory's; None without one."""
    directory = resolve_model_path(args.tokenizer_path or args.model_path, args.revision, args.download_dir)
    if args.chat_template is None:
        try:
            return ChatTemplate.from_dir(directory)
        except ChatTemplateError as error:
            logger.warning("Chat requests will be refused: %s", error)
            return None
    variables = ChatTemplate.variables_of_dir(directory)
    if "{" in args.chat_template:
        return ChatTemplate(args.chat_template, variables)
    if not Path(args.chat_template).is_file():
        raise ChatTemplateError(f"--chat-template {args.chat_template!r} is neither a file nor a template")
    return ChatTemplate.from_file(args.chat_template, variables)


@dataclass(frozen=True)
class ResponseHead:
    """Fields that every body and chunk of one answer begins with."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, rid: str | list[str], kind: str, model: str) -> ResponseHead:
        """Head of an answer that starts now."""
        return cls(rid if isinstance(rid, str) else rid[0], kind, int(time.time()), model)

    def body(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
        """A response or chunk; extra fields that are None are left out."""
        found = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return {**found, "choices": choices, "usage": usage, **{k: v for k, v in extra.items() if v is not None}}


def new_rid() -> str:
    """Id of a request whose client gave none."""
    return uuid.uuid4().hex
