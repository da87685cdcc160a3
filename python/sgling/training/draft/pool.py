"""A pool of samples on disk and what it was made with; refuses data of another tokenizer, vocabulary or template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sgling.srt.config.flags import ServerArgsError

from .rows import Sample
from .text_format import Identity

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pool:
    """Samples in a fixed order, and the identity of the target they were made for."""

    samples: tuple[Sample, ...]
    identity: Identity

    def write(self, path: Path) -> None:
        """One safetensors file; the identity is in its header."""
        sizes = np.array([len(sample.ids) for sample in self.samples], dtype=np.int64)
        tensors = {
            "ids": np.concatenate([sample.ids for sample in self.samples]).astype(np.int32),
            "answer": np.concatenate([sample.answer for sample in self.samples]).astype(np.uint8),
            "sizes": sizes,
            "regenerated": np.array([sample.regenerated for sample in self.samples], dtype=np.uint8),
            "temperatures": np.array([sample.temperature for sample in self.samples], dtype=np.float32),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path), {name: str(value) for name, value in self.identity._asdict().items()})


def read_pool(path: str | Path, identity: Identity) -> Pool:
    """A pool for the target of ``identity``.

    Raises ServerArgsError when the file is damaged, or was made with another tokenizer, vocabulary or chat template.
    Answers of another target are no longer counted as regenerated.
    """
    try:
        with safe_open(str(path), "numpy") as file:
            made = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("ids", "answer", "sizes", "regenerated")}
            temperatures = file.get_tensor("temperatures")
    except (SafetensorError, OSError) as error:
        raise ServerArgsError(f"--pool {path}: {error}") from error
    for name, value in identity._asdict().items():
        if name != "target" and made.get(name) != str(value):
            raise ServerArgsError(f"--pool {path}: made with {name} {made.get(name)}, the target has {value}")
    if len(tensors["ids"]) and tensors["ids"].max() >= identity.vocab_size:
        raise ServerArgsError(f"--pool {path}: token {tensors['ids'].max()} is beyond {identity.vocab_size} ids")
    own = made.get("target") == identity.target
    ends = tensors["sizes"].cumsum()
    parts = (np.split(tensors[name], ends[:-1]) for name in ("ids", "answer"))
    samples = tuple(
        Sample(ids, answer.astype(bool), bool(flag) and own, float(heat))
        for ids, answer, flag, heat in zip(*parts, tensors["regenerated"], temperatures, strict=True)
    )
    return Pool(samples, identity)


def supervised_summary(samples: Sequence[Sample]) -> str:
    """What is printed before step 1. Raises ServerArgsError when no sample has a supervised token."""
    counts = np.array([int(sample.answer.sum()) for sample in samples])
    if not counts.sum():
        raise ServerArgsError(
            f"none of {len(counts)} samples has a supervised token: no assistant turn was found in the text"
        )
    empty = int((counts == 0).sum())
    lines = [
        f"supervised tokens per sample: {counts.mean():.1f} on average, {counts.min()} to {counts.max()}, "
        f"{counts.sum()} in all over {len(counts)} samples"
    ]
    if empty:
        lines.append(f"{empty} samples have none and are left out")
    return "\n".join(lines)


def warn_if_given(samples: Sequence[Sample]) -> float:
    """Share of supervised tokens this target did not write; above 0 it is warned about."""
    total = sum(int(sample.answer.sum()) for sample in samples)
    given = sum(int(sample.answer.sum()) for sample in samples if not sample.regenerated)
    share = given / max(total, 1)
    if given:
        logger.warning(
            "%.1f %% of the supervised tokens were not written by this target: a drafter learns what the target says "
            "best from its own answers (--regenerate)",
            100 * share,
        )
    return share
