"""The training mix: scenarios by token share, chained conversations, real code, rendered through the chat template."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import sgling
from sgling.srt.parser.chat_template import ChatTemplate

from . import arithmetic, coding, long_report, small_talk, tool_calling, zh_chat
from .base import TRAIN, Generator, Sample, Slots, is_held_out_prompt

PICO_DIR = Path(sgling.__file__).parent / "assets" / "ling3-pico"
SCENARIOS: dict[str, Generator] = {
    "coding": coding.generate,
    "tool_calling": tool_calling.generate,
    "long_report": long_report.generate,
    "zh_chat": zh_chat.generate,
    "arithmetic": arithmetic.generate,
    "small_talk": small_talk.generate,
}
TOKEN_SHARES = {
    "coding": 0.28,
    "tool_calling": 0.28,
    "long_report": 0.11,
    "zh_chat": 0.10,
    "arithmetic": 0.15,
    "small_talk": 0.04,
    "stdlib": 0.04,
}
END_OF_TEXT = "<|endoftext|>"


class Document(NamedTuple):
    """Rendered text of one training document and the scenario it counts for."""

    scenario: str
    text: str


@cache
def template() -> ChatTemplate:
    return ChatTemplate.from_file(PICO_DIR / "chat_template.jinja")


def prompt_key(sample: Sample) -> str:
    """What must not be shared between training and held-out data: the first user turn and the tool names."""
    names = " ".join(tool["function"]["name"] for tool in sample.tools or ())
    return next(m["content"] for m in sample.messages if m["role"] == "user") + names


def draw(scenario: str, seed: str, split: str) -> Sample:
    """The first sample of a seeded sequence that belongs to the split.

    Small talk has few distinct prompts and is the same everywhere; the prompt filter does not apply to it.
    """
    for attempt in range(10_000):
        sample = SCENARIOS[scenario](Slots(random.Random(f"{seed}:{scenario}:{split}:{attempt}"), split))
        if scenario == "small_talk" or is_held_out_prompt(prompt_key(sample)) == (split != TRAIN):
            return sample
    raise RuntimeError(f"no {split} sample of {scenario} in 10,000 attempts")


def render(sample: Sample) -> str:
    """The whole conversation as text."""
    return template().render(sample.messages, sample.tools, enable_thinking=sample.enable_thinking)


def render_prompt(sample: Sample) -> str:
    """The conversation up to the first assistant turn, with the generation prompt."""
    first = next(index for index, message in enumerate(sample.messages) if message["role"] == "assistant")
    return template().render(
        sample.messages[:first], sample.tools, add_generation_prompt=True, enable_thinking=sample.enable_thinking
    )


def render_answer(sample: Sample) -> str:
    """The first assistant turn as the model should write it, end token excluded."""
    return render(sample)[len(render_prompt(sample)) :].split("<|role_end|>")[0]


def chained(first: Sample, seed: str) -> Sample:
    """One longer conversation from several samples without tools, so that later turns and longer contexts are seen."""
    rng = random.Random(f"{seed}:chain")
    messages = list(first.messages)
    for index in range(rng.randint(1, 7)):
        other = draw(
            rng.choice(("coding", "zh_chat", "arithmetic", "small_talk", "long_report")), f"{seed}:{index}", TRAIN
        )
        if not other.enable_thinking:
            messages += [message for message in other.messages if message["role"] != "system"]
    return first._replace(messages=messages)


@cache
def stdlib_pieces() -> tuple[str, ...]:
    """Top-level pieces of the Python standard library on this machine (PSF licence), 200 to 3,000 characters each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = (
        "test",
        "idlelib",
        "encodings",
        "site-packages",
        "dist-packages",
        "lib2to3",
        "turtledemo",
        "pydoc_data",
        "__pycache__",
    )
    pieces = []
    for path in sorted(root.rglob("*.py")):
        if any(part in skip for part in path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        for part in text.replace("\nclass ", "\n\x00class ").replace("\ndef ", "\n\x00def ").split("\x00"):
            if 200 <= len(part) <= 3000 and part.isascii():
                pieces.append(part.strip("\n"))
    return tuple(pieces)


def documents(seed: str, length_of: Callable[[str], int]) -> Iterator[Document]:
    """An endless, deterministic stream of training documents whose scenarios keep the token shares.

    ``length_of`` gives the token count of a text; after each document the scenario furthest behind its share is next.
    """
    counts = dict.fromkeys(TOKEN_SHARES, 0.0)
    rng = random.Random(f"{seed}:mix")
    for name, share in TOKEN_SHARES.items():
        counts[name] = rng.random() * 600 * share
    total = sum(counts.values())
    index = 0
    while True:
        scenario = max(TOKEN_SHARES, key=lambda name: TOKEN_SHARES[name] * total - counts[name])
        key = f"{seed}:{index}"
        if scenario == "stdlib":
            pieces = stdlib_pieces()
            text = pieces[rng.randrange(len(pieces))] + END_OF_TEXT
        else:
            sample = draw(scenario, key, TRAIN)
            if sample.tools is None and not sample.enable_thinking and rng.random() < 0.08:
                sample = chained(sample, key)
            text = render(sample)
        index += 1
        length = length_of(text)
        counts[scenario] += length
        total += length
        yield Document(scenario, text)
