"""Held-out quality and accept lengths of the training model, by greedy generation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from .checks import judge
from .decode import Decoder
from .generator.base import HELD_OUT, Sample
from .generator.mix import SCENARIOS, render_prompt
from .losses import Rows, chain_hiddens, rows_layout
from .model import Pico
from .ops import linear
from .scorecard import WIDTH, WIDTHS, accept_figures, card_samples, shares, splits_of
from .tokenizer import EOS_ID, PAD_ID


class Generated(NamedTuple):
    """Prompts and greedy answers of one scenario."""

    samples: list[Sample]
    prompts: list[list[int]]
    answers: list[list[int]]


def generate_answers(
    model: Pico, tokenizer: Tokenizer, samples: list[Sample], length: int, temperature: float = 0.0
) -> Generated:
    """Answers by the model; prompts too long for ``length`` are left out."""
    kept, prompts = [], []
    for sample in samples:
        ids = tokenizer.encode(render_prompt(sample), add_special_tokens=False).ids
        if len(ids) < length - 16:
            kept.append(sample)
            prompts.append(ids)
    answers = Decoder(model, prompts, length, (EOS_ID, PAD_ID), temperature).run()
    return Generated(kept, prompts, answers)


def quality(generated: Generated, tokenizer: Tokenizer, length: int) -> dict[str, float]:
    """Share of answers passing each check of their kind."""
    return shares(
        judge(sample, tokenizer.decode(answer, skip_special_tokens=False), len(prompt) + len(answer) <= length - 1)
        for sample, prompt, answer in zip(*generated, strict=True)
    )


@torch.no_grad()
def draft_hits(
    model: Pico, prompts: list[list[int]], answers: list[list[int]], length: int, depth: int
) -> torch.Tensor:
    """bool [R, depth, length]: whether draft j started at position p equals the generated token p + 1 + j."""
    device = model.norm.device
    text = torch.full((len(prompts), length), PAD_ID, dtype=torch.int64, device=device)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = [*prompt, *answer, EOS_ID][:length]
        text[row, : len(ids)] = torch.tensor(ids, device=device)
    positions = torch.arange(length, device=device).expand_as(text)
    documents = torch.arange(len(prompts), device=device)[:, None].expand_as(text)
    rows = Rows(text, torch.ones_like(text, dtype=torch.bool), documents, positions)
    hidden = model.trunk(text.flatten(), rows_layout(rows)).unflatten(0, text.shape)
    found = []
    for step, drafted in enumerate(chain_hiddens(model, rows, hidden, depth), start=1):
        guess = torch.stack([linear(part, model.head).argmax(-1) for part in drafted])
        found.append(guess == text.roll(-step - 1, 1))
    return torch.stack(found, 1).cpu()


def accept_run(hits: torch.Tensor, first: int, last: int, width: int) -> list[int]:
    """Accept lengths of the rounds that generate tokens ``first`` ... ``last``; hits [depth, length].

    Token ``first`` comes from the prefill, not from a round.
    """
    rounds, position = [], first - 1
    while position + 1 < last:
        accepted = 0
        while accepted < width - 1 and position + 2 + accepted <= last and bool(hits[accepted, position]):
            accepted += 1
        rounds.append(accepted + 1)
        position += accepted + 1
    return rounds


def accept_histograms(model: Pico, generated: Generated, length: int) -> dict[int, list[int]]:
    """By width: rounds by number of accepted drafts."""
    histograms = {width: [0] * width for width in WIDTHS}
    for start in range(0, len(generated.prompts), 16):
        prompts, answers = generated.prompts[start : start + 16], generated.answers[start : start + 16]
        hits = draft_hits(model, prompts, answers, length, max(WIDTHS) - 1)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            last = min(len(prompt) + len(answer), length - 1)
            for width, histogram in histograms.items():
                for count in accept_run(hits[row], len(prompt), last, width):
                    histogram[count - 1] += 1
    return histograms


def scenario_entry(model: Pico, tokenizer: Tokenizer, scenario: str, count: int, length: int) -> dict[str, Any]:
    """The score card's entry of a scenario, and four example answers."""
    entry: dict[str, Any] = {}
    for split in splits_of(scenario):
        generated = generate_answers(model, tokenizer, card_samples(scenario, split, count), length)
        histograms = accept_histograms(model, generated, length)
        accept = accept_figures(histograms)
        figures = quality(generated, tokenizer, length)
        entry[split] = figures | {"accept_length": accept["accept_length_by_width"][str(WIDTH)]}
        if split == HELD_OUT:
            entry |= accept
            entry["examples"] = [
                tokenizer.decode(prompt[-60:] + answer, skip_special_tokens=False)
                for prompt, answer in list(zip(generated.prompts, generated.answers, strict=True))[:4]
            ]
    return entry


def evaluate(model: Pico, tokenizer: Tokenizer, count: int, length: int) -> dict[str, Any]:
    """The score card by scenario, ``count`` prompts a split, prompt and answer of at most ``length`` tokens."""
    model.eval()
    return {scenario: scenario_entry(model, tokenizer, scenario, count, length) for scenario in SCENARIOS}
