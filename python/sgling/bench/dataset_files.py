"""Data sets from local files: ShareGPT-format JSON or JSONL, and JSONL of OpenAI chat requests."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sgling.bench.datasets import Prompt
from sgling.bench.tokenizer import BenchTokenizer

_SHORTEST = 2  # upstream drops prompts and answers of fewer tokens


class FileLimits(NamedTuple):
    """What is taken of a file.

    Attributes:
        num_prompts: entries at most; a shorter file gives fewer.
        output_len: tokens asked for; None = as long as the file's answer.
        context_len: prompts and answers that together exceed it are left out; None = no limit.
        seed: shuffles ShareGPT files.
    """

    num_prompts: int
    output_len: int | None
    context_len: int | None
    seed: int


def read_entries(path: str) -> list[dict[str, Any]]:
    """Objects of a JSON list or of JSON lines. Raises ValueError naming the file and the line that is neither."""
    text = Path(path).read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return json.loads(text)
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ValueError(f"{path}:{number}: not an object")
        entries.append(entry)
    return entries


def _turns(entry: dict[str, Any]) -> list[str]:
    turns = entry.get("conversations") or entry.get("conversation") or ()
    return [turn.get("value") or turn.get("content") or "" for turn in turns]


def sharegpt_texts(path: str) -> list[str]:
    """First turns of a ShareGPT file whose conversations have two; raises ValueError when there is none."""
    texts = [turns[0] for turns in map(_turns, read_entries(path)) if len(turns) >= 2 and turns[0].strip()]
    if not texts:
        raise ValueError(f"{path}: no conversation with two turns")
    return texts


def sharegpt_prompts(path: str, tokenizer: BenchTokenizer, limits: FileLimits) -> list[Prompt]:
    """First turns as prompts, the second turn's length as output length (unless ``limits`` fixes it)."""
    conversations = [turns for turns in map(_turns, read_entries(path)) if len(turns) >= 2]
    random.Random(limits.seed).shuffle(conversations)
    prompts: list[Prompt] = []
    for question, answer, *_ in conversations:
        if len(prompts) == limits.num_prompts:
            break
        ids = tokenizer.encode(question)
        output_len = limits.output_len or len(tokenizer.encode(answer))
        too_long = limits.context_len is not None and len(ids) + output_len > limits.context_len
        if min(len(ids), output_len) >= _SHORTEST and not too_long:
            prompts.append(Prompt(ids, question, output_len, messages=[{"role": "user", "content": question}]))
    if not prompts:
        raise ValueError(f"{path}: no conversation with two turns within the limits")
    return prompts


def openai_prompts(path: str, template: Any, tokenizer: BenchTokenizer, limits: FileLimits) -> list[Prompt]:
    """Bodies of chat requests (``messages``, ``tools``, ``max_tokens``), in file order.

    ``template`` renders the text that native and completions back ends send; None leaves them without text.
    """
    prompts = []
    for number, entry in enumerate(read_entries(path)[: limits.num_prompts], 1):
        messages = entry.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"{path}: entry {number} has no messages")
        asked = entry.get("max_completion_tokens") or entry.get("max_tokens")
        output_len = limits.output_len or asked
        if not output_len:
            raise ValueError(f"{path}: entry {number} has no max_tokens; give --sharegpt-output-len")
        kwargs, tools = entry.get("chat_template_kwargs") or {}, entry.get("tools")
        text = None if template is None else template.render(messages, tools, add_generation_prompt=True, **kwargs)
        ids = [] if text is None else tokenizer.encode(text)
        prompts.append(Prompt(ids, text, output_len, messages, tools, kwargs))
    if not prompts:
        raise ValueError(f"{path}: no entry")
    return prompts


def as_chat(prompts: Sequence[Prompt], template: Any, tokenizer: BenchTokenizer) -> list[Prompt]:
    """``--apply-chat-template``: text prompts wrapped as one user message each."""
    wrapped = []
    for prompt in prompts:
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        text = template.render(messages, prompt.tools, add_generation_prompt=True, **prompt.template_kwargs)
        wrapped.append(prompt._replace(ids=tokenizer.encode(text), text=text, messages=messages))
    return wrapped
