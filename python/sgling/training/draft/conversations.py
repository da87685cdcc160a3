"""Conversations to train on: the built-in scenarios or a JSONL file, tokenised with the target's own chat template."""

from __future__ import annotations

import json
import multiprocessing as mp
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.parser.chat_template import ChatTemplate

from ..data import Marks, assistant_mask
from ..generator.base import HELD_OUT, TRAIN
from ..generator.mix import SCENARIOS, chained, draw
from .text_format import TextFormat

DRAW_WEIGHTS = {
    "coding": 0.25,
    "tool_calling": 0.32,
    "long_report": 0.09,
    "zh_chat": 0.21,
    "arithmetic": 0.09,
    "small_talk": 0.04,
}
"""Share of conversations by scenario. Answers of reports are ten times as long as tool calls: of the supervised tokens
these are about 29, 13, 35, 16, 6 and 1 %."""
CHUNK = 64


class Conversation(NamedTuple):
    """Messages with tools; ``scenario`` groups held-out ones."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    thinking: bool
    scenario: str


class Prompt(NamedTuple):
    """Token ids up to where the target answers, and the whole conversation's ids with its supervised tokens."""

    ids: list[int]
    whole: np.ndarray
    answer: np.ndarray
    scenario: str


def built_in(seed: str, split: str = TRAIN, scenario: str | None = None) -> Conversation:
    """One conversation of the built-in scenarios, a function of its seed."""
    rng = random.Random(f"{seed}:draft")
    name = scenario or rng.choices(list(DRAW_WEIGHTS), list(DRAW_WEIGHTS.values()))[0]
    sample = draw(name, seed, split)
    if split == TRAIN and sample.tools is None and not sample.enable_thinking and rng.random() < 0.1:
        sample = chained(sample, seed)
    return Conversation(sample.messages, sample.tools, sample.enable_thinking, name)


def read_file(path: str) -> list[Conversation]:
    """Conversations of a JSONL file; raises ServerArgsError naming the line that cannot be used."""
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            messages = entry["messages"]
            roles = [message["role"] for message in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerArgsError(f"--conversations {path}, line {number}: {error!r}") from error
        if "user" not in roles:
            raise ServerArgsError(f"--conversations {path}, line {number}: no user message")
        scenario = str(entry.get("scenario", "file"))
        found.append(Conversation(messages, entry.get("tools"), bool(entry.get("enable_thinking")), scenario))
    if not found:
        raise ServerArgsError(f"--conversations {path}: no conversation")
    return found


class Encoder:
    """Renders and tokenises as the server does."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template, self.marks = tokenizer, template, Marks.of(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, talk: Conversation, turn: int | None) -> Prompt:
        """``turn``: which assistant message the target answers; None or none there: after the last user message."""
        spoken = [index for index, message in enumerate(talk.messages) if message["role"] == "assistant"]
        cut = spoken[turn % len(spoken)] if spoken and turn is not None else len(talk.messages)
        if turn is None and talk.messages[-1]["role"] == "assistant":
            cut = len(talk.messages) - 1
        text = self.template.render(
            talk.messages[:cut], talk.tools, add_generation_prompt=True, enable_thinking=talk.thinking
        )
        whole = self.encode(self.template.render(talk.messages, talk.tools, enable_thinking=talk.thinking))
        answer = assistant_mask(whole, self.marks)
        return Prompt(self.encode(text), np.array(whole, dtype=np.int32), answer, talk.scenario)


class Conversations:
    """Prompt ``i`` of a run is a function of (seed, i), for any number of worker processes."""

    def __init__(self, text: TextFormat, path: str | None, seed: int, keep: int) -> None:
        """``keep``: conversations at the end of a file that are held out."""
        self.encoder = Encoder(text.tokenizer, text.template)
        self.listed = None if path is None else read_file(path)
        self.kept: list[Conversation] = []
        self.seed = seed
        if self.listed is not None:
            if len(self.listed) <= keep:
                raise ServerArgsError(f"--conversations {path}: {len(self.listed)} lines, {keep} are held out")
            self.listed, self.kept = self.listed[:-keep], self.listed[-keep:]

    def prompt(self, index: int) -> Prompt:
        """The prompt of one number; which turn is answered changes from pass to pass over a file."""
        rng = random.Random(f"{self.seed}:{index}:turn")
        listed = self.listed
        talk = listed[index % len(listed)] if listed else built_in(f"draft:{self.seed}:{index}")
        return self.encoder.prompt(talk, rng.randrange(8))

    def chunk(self, first: int) -> list[Prompt]:
        """A task of a worker process."""
        return [self.prompt(index) for index in range(first, first + CHUNK)]

    def held_out(self, count: int) -> list[Prompt]:
        """Prompts never trained on: ``count`` a scenario, or the last ones of a file."""
        if self.listed is not None:
            return [self.encoder.prompt(talk, None) for talk in self.kept]
        talks = [built_in(f"select:{index}", HELD_OUT, name) for name in SCENARIOS for index in range(count)]
        return [self.encoder.prompt(talk, 0) for talk in talks]


_SOURCE: Conversations | None = None  # set in worker processes, which inherit it: tokenizers are not pickled


def _set_source(source: Conversations) -> None:
    global _SOURCE
    _SOURCE = source


def _chunk(first: int) -> list[Prompt]:
    return _SOURCE.chunk(first)


class PromptStream:
    """Makes prompts in worker processes (0: in this one); what is made does not depend on their number."""

    def __init__(self, source: Conversations, workers: int) -> None:
        """Forks: call it before anything is put on a GPU."""
        self.source = source
        self.pool = mp.get_context("fork").Pool(workers, _set_source, (source,)) if workers else None

    def prompts(self, first: int, count: int) -> Iterator[Prompt]:
        """Prompts ``first`` ... ``first`` + ``count`` - 1; workers begin at once and run ahead."""
        starts = range(first, first + count, CHUNK)
        chunks = map(self.source.chunk, starts) if self.pool is None else self.pool.imap(_chunk, starts)
        return self._cut(chunks, count)

    @staticmethod
    def _cut(chunks: Iterable[list[Prompt]], count: int) -> Iterator[Prompt]:
        left = count
        for chunk in chunks:
            yield from chunk[:left]
            left -= len(chunk)

    def close(self) -> None:
        """End the workers."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()
