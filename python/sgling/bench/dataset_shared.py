"""Generated shared prefix: groups of prompts that begin with the same system prompt, for prefix caches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sgling.bench.datasets import Prompt, fit_text, packaged_texts
from sgling.bench.tokenizer import BenchTokenizer


class SharedPrefixShape(NamedTuple):
    """Groups, prompts per group, and lengths in tokens."""

    num_groups: int
    prompts_per_group: int
    system_prompt_len: int
    question_len: int
    output_len: int
    seed: int


def shared_prefix_prompts(shape: SharedPrefixShape, tokenizer: BenchTokenizer) -> list[Prompt]:
    """Every prompt of every group, in random order; the prefix has exactly the asked length, the whole nearly so.

    Prefix and question are joined by a blank line and tokenised together, as the server will.
    """
    rng = np.random.default_rng(shape.seed)
    texts = packaged_texts()
    sources = [tokenizer.encode(text) for text in texts]

    def piece(length: int) -> str:
        source = sources[int(rng.integers(len(sources)))]
        return fit_text(tokenizer, source, int(rng.integers(len(source))), length)[1]

    prompts = []
    for group in range(shape.num_groups):
        prefix = piece(shape.system_prompt_len)
        for _ in range(shape.prompts_per_group):
            text = f"{prefix}\n\n{piece(shape.question_len)}"
            prompts.append(Prompt(tokenizer.encode(text), text, shape.output_len, label=f"group {group}"))
    order = rng.permutation(len(prompts))
    return [prompts[i] for i in order]
