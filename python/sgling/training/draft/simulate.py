"""Simulated accept length: greedy drafts at every position of held-out answers of the target, counted as rounds.

Drafts come from the true features and the drafter's own chain, as in serving at temperature 0; only the numerics of a
decode step are missing. It is the figure a drafter is selected by.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from sgling.srt.observability.acceptance import mean_accept_length, position_rates

from ..evaluate import accept_run
from ..losses import Rows, chain_hiddens
from ..model import Pico
from ..ops import eager, linear
from . import heads
from .drafter import Drafter
from .regenerate import Answered
from .rows import Anchors, RowBatch
from .target import Features, Target


class HeldOut(NamedTuple):
    """One held-out conversation: scenario, features of one row, index of the answer's first and last token."""

    scenario: str
    features: Features
    first: int
    last: int


class Drafting(Protocol):
    """A drafter under training."""

    width: int

    def hits(self, features: Features, span: tuple[int, int]) -> torch.Tensor:
        """bool [depth, S]: whether draft j of the round whose newest token is p + 1 equals token p + 2 + j.

        One row of features; ``span``: first and last newest token that is looked at.
        """


def hold_out(target: Target, answers: list[Answered], scenarios: list[str], size: tuple[int, int]) -> list[HeldOut]:
    """Features of held-out answers, each in a row of its own; ``scenarios`` by number of the answer.

    ``size``: rows of a target forward, tokens of a row.
    """
    count, length = size
    found: list[HeldOut] = []
    for first in range(0, len(answers), count):
        found += _held_out_rows(target, answers[first : first + count], scenarios, length)
    return found


def _held_out_rows(target: Target, answers: list[Answered], scenarios: list[str], length: int) -> list[HeldOut]:
    texts = [answered.ids[:length] for answered in answers]
    rows = RowBatch(*(torch.zeros(len(texts), length, dtype=torch.int64) for _ in range(4)))
    rows = rows._replace(answer=torch.zeros(len(texts), length, dtype=torch.bool))
    rows.tokens.fill_(target.text.pad)
    for row, ids in enumerate(texts):
        rows.tokens[row, : len(ids)] = torch.tensor(ids)
        rows.documents[row] = 2 * row + (torch.arange(length) >= len(ids))
        rows.positions[row] = torch.arange(length) - (torch.arange(length) >= len(ids)) * len(ids)
    with eager():
        features = target.features(rows)
    return [
        HeldOut(scenarios[answered.index], features.part(row, row + 1), answered.prompt_length, len(ids) - 1)
        for row, (answered, ids) in enumerate(zip(answers, texts, strict=True))
    ]


@torch.no_grad()
def dspark_hits(drafter: Drafter, features: Features, span: tuple[int, int], chunk: int = 256) -> torch.Tensor:
    """See :meth:`Drafting.hits`: the block at anchor a fills column a - 1."""
    tokens = features.rows.tokens[0]
    size, count = len(tokens), drafter.config.block_size
    hits = torch.zeros(count, size, dtype=torch.bool, device=tokens.device)
    steps = torch.arange(1, count + 1, device=tokens.device)
    for start in range(span[0], span[1] + 1, chunk):
        index = torch.arange(start, start + chunk, device=tokens.device).clamp_max(span[1])
        hidden = drafter.hidden(features, Anchors(index[None], torch.ones_like(index, dtype=torch.bool)[None]))[0]
        drafts = heads.greedy_drafts(drafter, hidden, tokens[index])
        wanted = index.unsqueeze(-1) + steps
        right = (drafts == tokens[wanted.clamp_max(size - 1)]) & (wanted < size)
        hits[:, index - 1] = right.T
    return hits


@torch.no_grad()
def nextn_hits(model: Pico, features: Features, depth: int) -> torch.Tensor:
    """See :meth:`Drafting.hits`, for the NEXTN layer's self-fed chain."""
    rows = features.rows
    text = Rows(rows.tokens, rows.answer, rows.documents, rows.positions)
    found = []
    for step, drafted in enumerate(chain_hiddens(model, text, features.hidden, depth), start=1):
        found.append(linear(drafted[0], model.head).argmax(-1) == rows.tokens[0].roll(-step - 1))
    return torch.stack(found)


def simulate(drafting: Drafting, held_out: list[HeldOut]) -> dict[str, Any]:
    """Accept length by scenario and position, and the mean over scenarios (``accept_length``)."""
    histograms: dict[str, list[int]] = {}
    for one in held_out:
        histogram = histograms.setdefault(one.scenario, [0] * drafting.width)
        with eager():
            hits = drafting.hits(one.features, (one.first, one.last)).cpu()
        for accepted in accept_run(hits, one.first, one.last, drafting.width):
            histogram[accepted - 1] += 1
    by_scenario = {
        scenario: {
            "accept_length": round(mean_accept_length(histogram) or 1.0, 3),
            "acceptance_by_position": [None if rate is None else round(rate, 3) for rate in position_rates(histogram)],
        }
        for scenario, histogram in histograms.items()
    }
    lengths = [entry["accept_length"] for entry in by_scenario.values()]
    return {"accept_length": round(sum(lengths) / max(len(lengths), 1), 4), "scenarios": by_scenario}
