"""Prompts, and those of exact token counts: packaged text, a local file's text, consecutive ids. Nothing is downloaded.

A prompt is sent as text, as ids or as chat messages. Random text is only used after it has been tokenised again to
exactly the asked length, as the server will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from sgling.bench.tokenizer import BenchTokenizer

_FIT_OFFSETS = 64  # starting points tried for a text of exact length
_FIT_STEPS = 8  # cut lengths tried per starting point


class Prompt(NamedTuple):
    """One request of a data set; exactly one of ``text`` and ``ids`` is sent: ``text`` unless it is None.

    Attributes:
        ids: token ids of the prompt (of its text, as the client's tokenizer counts them).
        output_len: tokens asked for.
        messages, tools, template_kwargs: what a chat back end sends instead; None for a plain prompt.
        label: scenario, "" for none.
        sample: the generator's sample, which knows how an answer is judged.
    """

    ids: list[int]
    text: str | None
    output_len: int
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = {}
    label: str = ""
    sample: Any = None

    @property
    def input_len(self) -> int:
        """Prompt length in tokens."""
        return len(self.ids)


@dataclass(frozen=True)
class RandomShape:
    """How many prompts, and how long.

    Lengths are uniform integers from max(int(length * range_ratio), 1) to length, both included.
    """

    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float
    seed: int

    def lengths(self, rng: np.random.Generator) -> list[tuple[int, int]]:
        """(input, output) length of every prompt."""

        def draw(length: int) -> np.ndarray:
            return rng.integers(max(int(length * self.range_ratio), 1), length + 1, size=self.num_prompts)

        return list(zip(draw(self.input_len).tolist(), draw(self.output_len).tolist(), strict=True))


def packaged_texts() -> list[str]:
    """The texts that ship with the package, one per paragraph."""
    file = resources.files("sgling.bench") / "data" / "prompts.txt"
    return [text.strip("\n") for text in file.read_text(encoding="utf-8").split("\n\n") if text.strip()]


def random_text_prompts(
    shape: RandomShape, tokenizer: BenchTokenizer, texts: list[str], as_ids: bool = False
) -> list[Prompt]:
    """Text prompts: a text from ``texts``, repeated end to end and cut to the exact length.

    The texts are shuffled and used in turn; when a text comes up again, the prompt starts somewhere inside it, so that
    equal prompts are rare. Raises ValueError when a text of exactly that length cannot be made.
    """
    rng = np.random.default_rng(shape.seed)
    lengths = shape.lengths(rng)
    order = rng.permutation(len(texts))
    sources = [tokenizer.encode(texts[i]) for i in order]
    prompts = []
    for number, (input_len, output_len) in enumerate(lengths):
        source = sources[number % len(sources)]
        first = 0 if number < len(sources) else int(rng.integers(len(source)))
        if as_ids:
            prompts.append(Prompt(repeat_ids(source, first, input_len), None, output_len))
        else:
            prompts.append(Prompt(*fit_text(tokenizer, source, first, input_len), output_len))
    return prompts


def random_id_prompts(shape: RandomShape, tokenizer: BenchTokenizer, as_ids: bool = True) -> list[Prompt]:
    """Prompts of consecutive ids: token j of prompt i is (offset_i + i + j) modulo the vocabulary size."""
    rng = np.random.default_rng(shape.seed)
    lengths = shape.lengths(rng)
    offsets = rng.integers(tokenizer.vocab_size, size=shape.num_prompts)
    prompts = []
    for number, (input_len, output_len) in enumerate(lengths):
        begin = int(offsets[number]) + number
        if as_ids:
            ids = [(begin + j) % tokenizer.vocab_size for j in range(input_len)]
            prompts.append(Prompt(ids, None, output_len))
        else:
            vocabulary = list(range(tokenizer.vocab_size))
            prompts.append(Prompt(*fit_text(tokenizer, vocabulary, begin, input_len), output_len))
    return prompts


def repeat_ids(source: list[int], first: int, length: int) -> list[int]:
    """``length`` ids of ``source`` read in a circle from index ``first``."""
    return [source[(first + j) % len(source)] for j in range(length)]


def fit_text(tokenizer: BenchTokenizer, source: list[int], first: int, length: int) -> tuple[list[int], str]:
    """(ids, text) where the text tokenises to exactly ``length`` ids.

    Cutting text at a token border may merge or split tokens, so the cut is corrected by the difference, and the start
    is moved on when that does not settle. Raises ValueError when nothing fits.
    """
    for offset in range(first, first + _FIT_OFFSETS):
        cut = length
        for _ in range(_FIT_STEPS):
            text = tokenizer.decode(repeat_ids(source, offset, cut))
            ids = tokenizer.encode(text)
            if len(ids) == length:
                return ids, text
            cut += length - len(ids)
            if cut < 1:
                break
    raise ValueError(f"no text of exactly {length} tokens found; send ids instead (--tokenize-prompt)")
