"""Held-out quality and accept lengths of the training model, by greedy generation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from .checks import judge
from .decode import Decoder
from .generator.base import HELD_OUT, NEW_FAMILY, NEW_PROMPT, Sample
from .generator.mix import SCENARIOS, draw, render_prompt
from .losses import Rows, chain_hiddens, rows_layout
from .model import Pico
from .ops import linear
from .tokenizer import EOS_ID, PAD_ID

DEPTH = 7
"""Drafts measured; the server's widest chain is 8 rows."""


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
    totals: dict[str, list[bool]] = {}
    for sample, prompt, answer in zip(*generated, strict=True):
        text = tokenizer.decode(answer, skip_special_tokens=False)
        for name, passed in judge(sample, text, len(prompt) + len(answer) <= length - 1).items():
            totals.setdefault(name, []).append(passed)
    return {name: round(sum(passed) / len(passed), 4) for name, passed in totals.items()}


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


def accept_report(model: Pico, generated: Generated, length: int) -> dict[str, Any]:
    """Mean accept length at widths 4 and 8, and the conditional acceptance by position at width 8."""
    rounds: dict[int, list[int]] = {4: [], 8: []}
    for start in range(0, len(generated.prompts), 16):
        prompts, answers = generated.prompts[start : start + 16], generated.answers[start : start + 16]
        hits = draft_hits(model, prompts, answers, length, DEPTH)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            last = min(len(prompt) + len(answer), length - 1)
            for width, found in rounds.items():
                found += accept_run(hits[row], len(prompt), last, width)
    wide = rounds[8] or [1]
    reached = [sum(count > step for count in wide) for step in range(8)]
    conditional = [round(reached[step + 1] / max(1, reached[step]), 3) for step in range(7)]
    return {
        "accept_length_4": round(sum(rounds[4]) / max(1, len(rounds[4])), 3),
        "accept_length_8": round(sum(wide) / len(wide), 3),
        "acceptance_by_position": conditional,
    }


def evaluate(model: Pico, tokenizer: Tokenizer, count: int, length: int) -> dict[str, Any]:
    """Per scenario: quality of new prompts, held-out slots and new families; accept lengths; four example answers.

    Accept lengths are measured on answers to new prompts without thinking, which is what the server sees most.
    """
    model.eval()
    report: dict[str, Any] = {}
    for scenario in SCENARIOS:
        samples = [draw(scenario, f"eval:{index}", NEW_PROMPT) for index in range(count)]
        generated = generate_answers(model, tokenizer, samples, length)
        entry: dict[str, Any] = {"new_prompt": quality(generated, tokenizer, length)}
        plain = [index for index, sample in enumerate(generated.samples) if not sample.enable_thinking][:48]
        subset = Generated(*([part[index] for index in plain] for part in generated))
        entry |= accept_report(model, subset, length)
        for split in (HELD_OUT, NEW_FAMILY) if scenario != "small_talk" else ():
            fresh = [draw(scenario, f"eval:{index}", split) for index in range(count)]
            entry[split] = quality(generate_answers(model, tokenizer, fresh, length), tokenizer, length)
        entry["examples"] = [
            tokenizer.decode(prompt[-60:] + answer, skip_special_tokens=False)
            for prompt, answer in list(zip(generated.prompts, generated.answers, strict=True))[:4]
        ]
        report[scenario] = entry
    return report
