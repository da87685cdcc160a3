"""The trainable drafter computes what is served, its losses are those of docs/training.md, and nothing leaks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from model.tiny_drafter import MLA, drafter_config, drafter_tensors
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.training.draft import heads, losses
from sgling.training.draft.drafter import Drafter
from sgling.training.draft.rows import Anchors, Sample, can_anchor, draw_anchors, pack
from sgling.training.draft.target import Features
from spec import dspark_reference

VARIANTS = {
    "dense": {},
    "interleaved, half rotated": {"rope_is_neox_style": False, "rope_dim": 8},
    "mla": MLA,
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "window": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    "row 0 unused": {"sample_from_anchor": False},
}


def case(**overrides) -> tuple[DSparkConfig, Drafter, dict]:
    """(config, trainable drafter, the same parameters as a dict) with random weights in every place."""
    raw = drafter_config(**overrides)
    config = DSparkConfig.from_dict(raw)
    tensors = {name: value.float() for name, value in drafter_tensors(raw).items()}
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(512, 64, generator=generator) * 0.3 for _ in range(2))
    return config, Drafter(config, tensors, embedding, head), tensors


def packed(lengths: list[int], rows: int, length: int, seed: int = 0) -> tuple[Features, list[Sample]]:
    """Conversations of random tokens whose second half is supervised, with random features."""
    rng = np.random.default_rng(seed)
    samples = []
    for size in lengths:
        samples.append(Sample(rng.integers(0, 500, size).astype(np.int32), np.arange(size) >= size // 2, True, 0.0))
    batch = pack(samples, rows, length, pad=511)
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(rows, length, 192, generator=generator)
    return Features(batch, taps, torch.randn(rows, length, 64, generator=generator)), samples


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_packed_blocks_equal_the_reference_of_each_conversation_alone(name):
    config, drafter, params = case(**VARIANTS[name])
    features, samples = packed([14, 17, 20], rows=2, length=32)
    anchors = draw_anchors(features.rows, 5, seed=3, step=7)
    hidden = drafter.hidden(features, anchors)
    forced = heads.forced_mix(drafter, hidden, losses.block_labels(features, anchors, config.block_size).previous)
    places = {0: (0, 0), 1: (0, 14), 2: (1, 0)}
    compared = 0
    for number, (row, start) in places.items():
        size = len(samples[number].ids)
        taps = features.taps[row, start : start + size]
        ids = torch.from_numpy(samples[number].ids).long()
        for block, index in enumerate(anchors.index[row].tolist()):
            if not anchors.valid[row, block] or not start <= index < start + size:
                continue
            anchor = torch.tensor([index - start])
            expected = dspark_reference.block_hidden(params, config, taps, ids, anchor, drafter.embedding)
            torch.testing.assert_close(hidden[row, block], expected[0], atol=2e-5, rtol=1e-4)
            offsets = (anchor + torch.arange(config.block_size)).clamp_max(size - 1)
            previous = ids[offsets]
            known = index - start + config.block_size <= size
            if known:
                bias = dspark_reference.markov_bias(params, config, expected, previous[None])[0]
                ours = forced[row, block] @ params["markov_head.markov_w2.weight"].T
                torch.testing.assert_close(ours, bias, atol=2e-5, rtol=1e-4)
                estimate = heads.confidence(drafter, expected, previous[None])
                wanted = dspark_reference.confidence(params, config, expected, previous[None])
                torch.testing.assert_close(estimate, wanted, atol=2e-5, rtol=1e-4)
            compared += 1
    assert compared >= 8


@torch.no_grad()
def test_a_block_sees_nothing_of_the_future_and_nothing_of_its_neighbours():
    _, drafter, _ = case()
    features, _ = packed([16, 16], rows=1, length=32)
    anchors = Anchors(torch.tensor([[9, 25]]), torch.ones(1, 2, dtype=torch.bool))
    before = drafter.hidden(features, anchors)
    taps = features.taps.clone()
    taps[0, 9:16] += 1.0  # the anchor's own feature and all behind it
    tokens = features.rows.tokens.clone()
    tokens[0, 10:16] = 3
    changed = features._replace(taps=taps, rows=features.rows._replace(tokens=tokens))
    assert torch.equal(drafter.hidden(changed, anchors), before)
    taps = features.taps.clone()
    taps[0, 8] += 1.0
    moved = (drafter.hidden(features._replace(taps=taps), anchors) - before).abs().amax((-1, -2))[0]
    assert moved[0] > 1e-4 and moved[1] == 0
    tokens = features.rows.tokens.clone()
    tokens[0, 9] = (tokens[0, 9] + 1) % 500
    other = drafter.hidden(features._replace(rows=features.rows._replace(tokens=tokens)), anchors)
    assert (other - before)[0, 0].abs().max() > 1e-4


def test_rows_hold_whole_conversations_and_labels_stay_inside_them():
    features, samples = packed([10, 12, 30, 9], rows=3, length=24)
    rows = features.rows
    assert rows.tokens[0, :22].tolist() == [*samples[0].ids, *samples[1].ids]
    assert rows.tokens[1].tolist() == samples[2].ids[:24].tolist() and rows.positions[1].tolist() == list(range(24))
    assert rows.documents[0, 9] != rows.documents[0, 10] != rows.documents[0, 22]
    anchors = Anchors(torch.tensor([[7, 20], [15, 22], [0, 7]]), torch.ones(3, 2, dtype=torch.bool))
    labels = losses.block_labels(features, anchors, 4)
    assert labels.counts[0].tolist() == [[True, True, False, False], [True, False, False, False]]
    assert labels.label[0, 0, :2].tolist() == samples[0].ids[8:10].tolist()
    assert labels.previous[0, 0, :2].tolist() == samples[0].ids[7:9].tolist()
    assert torch.equal(labels.teacher[0, 0, 1], features.hidden[0, 8])
    assert not labels.counts[2, 0].any()  # label 1 of an anchor before the answer is no answer
    assert can_anchor(rows)[0].nonzero().flatten().tolist() == [5, 6, 7, 8, 16, 17, 18, 19, 20]


def test_anchors_are_drawn_from_supervised_tokens_and_keyed_by_step():
    features, _ = packed([24, 40], rows=2, length=48)
    one, again, other = (draw_anchors(features.rows, 6, 1, step) for step in (4, 4, 5))
    assert torch.equal(one.index, again.index) and not torch.equal(one.index, other.index)
    assert can_anchor(features.rows).gather(1, one.index)[one.valid].all()
    assert one.valid.sum() == 12 and (one.index.diff(dim=1) > 0).all()


def plain_losses(logits, teacher, labels, decay: float) -> tuple[float, float, float]:
    """(CE, L1, expected accepted length) by loops, from logits [A, g, V] and the counted rows."""
    ce = l1 = total = length = 0.0
    for block in range(len(logits)):
        reach = 1.0
        for k in range(logits.shape[1]):
            if not labels.counts[0, block, k]:
                break
            weight = math.exp(-k / decay)
            q, p = logits[block, k].softmax(-1), teacher[block, k].softmax(-1)
            distance = float((q - p).abs().sum())
            ce -= weight * float(q[labels.label[0, block, k]].log())
            l1 += weight * distance
            total += weight
            reach *= 1 - distance / 2
            length += reach
    return ce / total, l1 / total, length


@torch.no_grad()
def test_loss_terms_are_their_formulas():
    config, drafter, params = case()
    features, _ = packed([30], rows=1, length=32)
    anchors = draw_anchors(features.rows, 6, 0, 0)
    sums = losses.block_sums(drafter, features, anchors, decay=2.0)
    labels = losses.block_labels(features, anchors, config.block_size)
    hidden = drafter.hidden(features, anchors)
    logits = hidden @ drafter.head.T + dspark_reference.markov_bias(params, config, hidden[0], labels.previous[0])
    teacher = labels.teacher @ drafter.head.T
    ce, l1, length = plain_losses(logits[0], teacher[0], labels, 2.0)
    assert float(sums.ce / sums.weight) == pytest.approx(ce, rel=1e-4)
    assert float(sums.l1 / sums.weight) == pytest.approx(l1, rel=1e-4)
    assert float(sums.length) == pytest.approx(length, rel=1e-4)
    overlap = 1 - 0.5 * (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    estimate = dspark_reference.confidence(params, config, hidden[0], labels.previous[0])
    weight = labels.counts.float() * torch.exp(-torch.arange(4) / 2.0)
    bce = F.binary_cross_entropy_with_logits(estimate[None], overlap.clamp(0, 1), reduction="none")
    assert float(sums.confidence) == pytest.approx(float((bce * weight).sum()), rel=1e-4)
    weights = losses.Weights(0.1, 0.9, 1.0, 0.5)
    total = losses.total_loss(sums, weights, torch.stack((sums.weight, sums.blocks)))
    confidence = float(sums.confidence / sums.weight)
    assert float(total) == pytest.approx(0.1 * ce + 0.9 * l1 + confidence - 0.5 * length / 6, rel=1e-4)


def gradients(length: float, confidence: float, ce: float = 0.0) -> dict[str, torch.Tensor | None]:
    _, drafter, _ = case()
    features, _ = packed([30], rows=1, length=32)
    sums = losses.block_sums(drafter, features, draw_anchors(features.rows, 6, 0, 0), decay=2.0)
    divisors = torch.stack((sums.weight, sums.blocks)).detach()
    losses.total_loss(sums, losses.Weights(ce, ce, confidence, length), divisors).backward()
    return {name: value.grad for name, value in drafter.params.items()}


def test_confidence_reaches_only_its_own_head():
    found = gradients(length=0.0, confidence=1.0)
    moved = {name for name, value in found.items() if value is not None and value.abs().sum() > 0}
    assert moved == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_every_parameter_is_trained():
    found = gradients(length=0.1, confidence=1.0, ce=0.5)
    assert not [name for name, value in found.items() if value is None or not value.abs().sum() > 0]


def test_length_term_rewards_longer_accepted_prefixes():
    """A small step along its gradient alone makes the expected accepted length grow."""
    _, drafter, _ = case()
    features, _ = packed([30], rows=1, length=32)
    anchors = draw_anchors(features.rows, 6, 0, 0)

    def expected() -> torch.Tensor:
        return losses.block_sums(drafter, features, anchors, decay=2.0).length

    before = expected()
    (-before).backward()
    with torch.no_grad():
        for value in drafter.params.values():
            if value.grad is not None:
                value -= 0.01 * value.grad / value.grad.norm().clamp_min(1e-9)
    assert expected() > before


@torch.no_grad()
def test_greedy_drafts_follow_the_chain_of_their_own_tokens():
    config, drafter, params = case()
    hidden = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([5, 6, 7])
    drafts = heads.greedy_drafts(drafter, hidden, anchors)
    previous = torch.cat((anchors[:, None], drafts[:, :-1]), 1)
    logits = hidden @ drafter.head.T + dspark_reference.markov_bias(params, config, hidden, previous)
    assert torch.equal(logits.argmax(-1), drafts)


def test_ranks_with_common_divisors_add_up_to_the_whole_batch():
    """What trainer ranks of SplitServe do: each its rows, divided by the divisors of all; gradients are added."""
    features, _ = packed([30, 18], rows=2, length=32)
    anchors = draw_anchors(features.rows, 6, 0, 0)
    weights = losses.Weights(0.3, 0.7, 1.0, 0.1)

    def parts(cuts: list[slice]) -> dict[str, torch.Tensor]:
        _, drafter, _ = case()
        sums = [
            losses.block_sums(
                drafter, features.part(cut.start, cut.stop), Anchors(*(value[cut] for value in anchors)), 2.0
            )
            for cut in cuts
        ]
        divisors = torch.stack([torch.stack((part.weight, part.blocks)) for part in sums]).sum(0)
        for part in sums:
            losses.total_loss(part, weights, divisors).backward()
        return {name: value.grad for name, value in drafter.params.items()}

    whole, halves = parts([slice(0, 2)]), parts([slice(0, 1), slice(1, 2)])
    for name, gradient in whole.items():
        torch.testing.assert_close(halves[name], gradient, atol=1e-6, rtol=1e-4)
