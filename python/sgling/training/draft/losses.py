"""Losses of a DSpark drafter on a batch of blocks (docs/training.md): CE, L1, confidence, expected accepted length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..ops import compiled, linear
from . import heads
from .drafter import Drafter
from .rows import Anchors
from .target import Features


class Labels(NamedTuple):
    """Of every block row [R, A, g]: token before it, token to predict, whether it counts; the target's hidden there."""

    previous: torch.Tensor
    label: torch.Tensor
    counts: torch.Tensor
    teacher: torch.Tensor


class Sums(NamedTuple):
    """Weighted sums over a batch, and their divisors; divisors are added up over ranks before the division."""

    ce: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    length: torch.Tensor
    weight: torch.Tensor
    blocks: torch.Tensor
    overlap: torch.Tensor
    hits: torch.Tensor


class Weights(NamedTuple):
    """Weights of the terms of one step."""

    ce: float
    l1: float
    confidence: float
    length: float


def block_labels(features: Features, anchors: Anchors, count: int) -> Labels:
    """Draft k (1 ... count) of the block at index a is judged at a + k, by the target's row a + k - 1.

    It counts while the block's tokens are supervised and of the anchor's conversation: counts is prefix-closed.
    """
    rows, size = features.rows, features.rows.tokens.shape[1]
    steps = torch.arange(count, device=anchors.index.device)
    before = anchors.index.unsqueeze(-1) + steps
    after = (before + 1).flatten(1)
    inside = (after < size).view_as(before)
    after, flat = after.clamp_max(size - 1), before.flatten(1).clamp_max(size - 1)

    def at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return values.gather(1, index).view_as(before)

    document = rows.documents.gather(1, anchors.index).unsqueeze(-1)
    counts = inside & at(rows.answer, after) & (at(rows.documents, after) == document) & anchors.valid.unsqueeze(-1)
    counts = counts.cumprod(-1).bool()
    width = features.hidden.shape[-1]
    teacher = features.hidden.gather(1, flat.unsqueeze(-1).expand(-1, -1, width)).view(*before.shape, width)
    return Labels(at(rows.tokens, flat), at(rows.tokens, after), counts, teacher)


@compiled
def row_terms(hidden, mixed, weights, label, teacher):
    """Per row [N]: cross entropy, L1 distance to the target's distribution, whether the two best tokens agree.

    ``weights``: (head, W2 or None).
    """
    head, w2 = weights
    logits = linear(hidden, head).float()
    if w2 is not None:
        logits = logits + linear(mixed, w2).float()
    target = linear(teacher, head).float()
    logs = logits.log_softmax(-1)
    ce = -logs.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    l1 = (logs.exp() - target.softmax(-1)).abs().sum(-1)
    return ce, l1, (logits.argmax(-1) == target.argmax(-1)).float()


def block_sums(drafter: Drafter, features: Features, anchors: Anchors, decay: float) -> Sums:
    """All sums of one batch."""
    config = drafter.config
    labels = block_labels(features, anchors, config.block_size)
    hidden = drafter.hidden(features, anchors)
    has_markov = config.markov_rank > 0
    mixed = heads.forced_mix(drafter, hidden, labels.previous) if has_markov else hidden
    w2 = drafter.params["markov_head.markov_w2.weight"] if has_markov else None
    flat = (value.flatten(0, 2) for value in (hidden, mixed))
    terms = row_terms(*flat, (drafter.head, w2), labels.label.flatten(), labels.teacher.flatten(0, 2))
    ce, l1, hits = (term.view_as(labels.label) for term in terms)
    counts = labels.counts.float()
    weight = counts * torch.exp(-torch.arange(config.block_size, device=counts.device) / decay)
    overlap = 1 - 0.5 * l1
    if config.confidence:
        estimate = heads.confidence(drafter, hidden, labels.previous)
        bce = F.binary_cross_entropy_with_logits(estimate, overlap.detach().clamp(0, 1), reduction="none")
    else:
        bce = torch.zeros_like(ce)
    survival = (overlap * counts).cumprod(-1).sum(-1)
    return Sums(
        *((term * weight).sum() for term in (ce, l1, bce)),
        (survival * anchors.valid).sum(),
        weight.sum(),
        anchors.valid.float().sum(),
        (overlap.detach() * counts).sum((0, 1)) / counts.sum((0, 1)).clamp_min(1),
        (hits * counts).sum((0, 1)) / counts.sum((0, 1)).clamp_min(1),
    )


def total_loss(sums: Sums, weights: Weights, divisors: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the terms; ``divisors`` [2]: row weight and blocks over all ranks."""
    rows, blocks = divisors.clamp_min(1.0)
    per_row = weights.ce * sums.ce + weights.l1 * sums.l1 + weights.confidence * sums.confidence
    return per_row / rows - weights.length * sums.length / blocks
