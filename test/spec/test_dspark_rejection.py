"""Conformance 7 and 8 (docs/dspark.md §8): the law of sampled output, and the expected number of accepted drafts."""

from __future__ import annotations

import math

import pytest
import torch

from model.tiny_drafter import write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling_kernel.sampling import AdjustInputs, SamplingFlags, SamplingTables, SingleShard
from sgling_kernel.verdict import Verdict, draw_draft, round_seed, verdict_rejection, verdict_sampled
from spec.dspark_harness import dspark
from spec.harness import Harness, random_prompt, request

VOCAB, DRAWS = 4, 400_000
CHI2_DOF_15_AT_1E_4 = 44.26
SAMPLED = SamplingFlags(sampled=True)


def toy_logits(seed: int) -> torch.Tensor:
    """[V + 1 predecessors (the last one: the root), V]: a distribution of the next token for every token."""
    return torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.2


TARGET, DRAFTER = toy_logits(1), toy_logits(2)
ROOT = VOCAB


def tables(count: int, temperature: float = 1.0) -> SamplingTables:
    """One request per draw, each with a seed of its own (row 0 is the dummy)."""
    rows = count + 1
    zeros = torch.zeros(rows)
    return SamplingTables(
        temperature=torch.full((rows,), temperature), top_k=torch.full((rows,), -1), top_p=torch.ones(rows),
        min_p=zeros, seed=torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(3)),
        frequency_penalty=zeros, presence_penalty=zeros, repetition_penalty=torch.ones(rows),
        min_len_limit=torch.zeros(rows, dtype=torch.int64), vocab_start=0,
        counts=None, prompt_seen=None, bias=None, stop_mask=None,
    )  # fmt: skip


def speculate(table: SamplingTables, root: torch.Tensor, start: int, limits: torch.Tensor | None = None) -> Verdict:
    """One round of two Markov-dependent drafts for every request; ``root`` int64 [bs] tokens at position ``start``."""
    count = len(root)
    rows, starts = torch.arange(1, count + 1), torch.full((count,), start)
    seeds = round_seed(table.seed[rows], starts, "draft")
    previous, drafts, kept = root, [], []
    for k in range(2):
        kept.append(DRAFTER[previous])
        _, previous = draw_draft(kept[-1], table.temperature[rows], seeds, starts + k, 0)
        drafts.append(previous)
    candidates = torch.stack((root, *drafts), -1)
    logits = TARGET[candidates].flatten(0, 1)
    positions = (starts[:, None] + torch.arange(3)).flatten()
    limits = torch.full((count,), 2) if limits is None else limits
    inputs = AdjustInputs(table, rows, candidates, positions)
    return verdict_rejection(logits, torch.stack(kept, 1), starts, limits, inputs, SAMPLED, SingleShard())


def first_two_tokens(table: SamplingTables, limits: torch.Tensor | None = None) -> torch.Tensor:
    """The first two emitted tokens [bs, 2], over as many rounds as that takes."""
    root = torch.full((len(table.seed) - 1,), ROOT)
    first = speculate(table, root, 10, limits)
    second = speculate(table, first.target_ids[:, 0], 11, limits)
    later = torch.where(first.accept_lens > 1, first.target_ids[:, 1], second.target_ids[:, 0])
    return torch.stack((first.target_ids[:, 0], later), -1)


def joint_law(temperature: float = 1.0) -> torch.Tensor:
    """p(x1) p(x2 | x1) of the target, [V, V]."""
    p = (TARGET / temperature).softmax(-1)
    return p[ROOT][:, None] * p[:VOCAB]


def chi2(tokens: torch.Tensor, law: torch.Tensor) -> float:
    observed = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2).double()
    expected = law.flatten().double() * len(tokens)
    return float(((observed - expected).square() / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_7_rejection_emits_the_targets_joint_law(temperature):
    tokens = first_two_tokens(tables(DRAWS, temperature))
    assert chi2(tokens, joint_law(temperature)) < CHI2_DOF_15_AT_1E_4


@pytest.mark.parametrize("limit", [0, 1])
def test_7_a_verify_cut_short_emits_the_same_law(limit):
    tokens = first_two_tokens(tables(DRAWS), torch.full((DRAWS,), limit))
    assert chi2(tokens, joint_law()) < CHI2_DOF_15_AT_1E_4


def test_7_sampled_verify_emits_the_targets_joint_law():
    """The default rule: the drafts do not matter at all, so a draft of constants will do."""
    table = tables(DRAWS)
    root, rows = torch.full((DRAWS,), ROOT), torch.arange(1, DRAWS + 1)
    tokens = []
    for position in (10, 11):
        inputs = AdjustInputs(table, rows, root[:, None], torch.full((DRAWS,), position))
        root = verdict_sampled(TARGET[root], inputs, SAMPLED, SingleShard()).bonus
        tokens.append(root)
    assert chi2(torch.stack(tokens, -1), joint_law()) < CHI2_DOF_15_AT_1E_4


def test_7_the_instrument_sees_a_wrong_law():
    """Keeping every draft emits the drafter's law: chi-square must explode."""
    q = DRAFTER.softmax(-1)
    tokens = torch.multinomial((q[ROOT][:, None] * q[:VOCAB]).flatten(), DRAWS, replacement=True)
    assert chi2(torch.stack((tokens // VOCAB, tokens % VOCAB), -1), joint_law()) > 1000


def test_8_mean_number_of_accepted_drafts_is_the_overlap_along_the_accepted_path():
    p, q = TARGET.softmax(-1), DRAFTER.softmax(-1)
    overlap = torch.minimum(p, q)
    expected = float((overlap[ROOT] * (1 + overlap[:VOCAB].sum(-1))).sum())
    accepted = (speculate(tables(DRAWS), torch.full((DRAWS,), ROOT), 10).accept_lens - 1).double()
    error = float(accepted.std()) / math.sqrt(DRAWS)
    assert abs(float(accepted.mean()) - expected) < 4 * error


def test_filters_act_on_the_target_only():
    """top-k 1 under temperature 1 is greedy whatever the drafter proposes."""
    table = tables(2000)._replace(top_k=torch.ones(2001, dtype=torch.int64))
    rows, root = torch.arange(1, 2001), torch.full((2000,), ROOT)
    candidates = torch.stack((root, torch.randint(0, 4, (2000,)), torch.randint(0, 4, (2000,))), -1)
    logits = TARGET[candidates].flatten(0, 1)
    draft_logits = torch.zeros(2000, 2, VOCAB)
    positions = torch.arange(3).repeat(2000)
    flags = SamplingFlags(sampled=True, top_k=True)
    inputs = AdjustInputs(table, rows, candidates, positions)
    starts = torch.zeros(2000, dtype=torch.int64)
    verdict = verdict_rejection(logits, draft_logits, starts, torch.full((2000,), 2), inputs, flags, SingleShard())
    best = logits.argmax(-1).view(2000, 3)
    emitted = torch.arange(3) < verdict.accept_lens[:, None]
    assert torch.equal(verdict.target_ids[emitted], best[emitted])
    assert (verdict.accept_lens > 1).any()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


def test_engine_rejection_keeps_greedy_requests_exact_and_repeats_under_a_seed(target, tmp_path):
    drafter = write_tiny_drafter(tmp_path, block_size=6)
    requests = [
        request("g", random_prompt(13, 1)),
        request("ss", random_prompt(30, 2), temperature=1.0),
        request("ppp", random_prompt(9, 3), temperature=0.8, top_p=0.9, frequency_penalty=0.5),
    ]
    runs = [dspark(target, drafter, speculative_use_rejection_sampling=True).run(*requests) for _ in range(2)]
    assert {rid: o.ids for rid, o in runs[0].items()} == {rid: o.ids for rid, o in runs[1].items()}
    plain = Harness(target, speculative_algorithm="none").run(requests[0])
    assert runs[0]["g"].ids == plain["g"].ids


def test_engine_rejection_accepts_what_sampled_verify_would_not(target, tmp_path):
    """At high temperature p/q accepts by overlap; it must reach at least the count of exact matches."""
    drafter = write_tiny_drafter(tmp_path, block_size=4)
    requests = [request(f"r{i}", random_prompt(9 + i, i), temperature=8.0, max_new_tokens=100) for i in range(4)]
    accepted = {}
    for mode in (False, True):
        harness = dspark(target, drafter, speculative_use_rejection_sampling=mode)
        harness.run(*requests)
        accepted[mode] = harness.core.stats.avg_accept_length
    assert accepted[True] > 2.0 and accepted[True] > accepted[False] - 0.3, accepted
