"""Verdict: acceptance, exactness of sampled verify, equality with one-token-at-a-time decoding."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ops.sampling_tables import make_tables, shard_tables
from ops.shard_threads import run_sharded
from sgling_kernel.logits import argmax_lowest
from sgling_kernel.sampling import AdjustInputs, SamplingFlags, SingleShard, commit_counts
from sgling_kernel.verdict import (
    chain_accept,
    target_ids_greedy,
    target_ids_sampled,
    verdict_greedy,
    verdict_masked,
    verdict_sampled,
)

ALL = SamplingFlags(*[True] * 7)
ONE = SingleShard()
INF = float("inf")


def test_argmax_ties_nan_and_dtype():
    nan = torch.nan
    scores = torch.tensor([[1.0, 3.0, 3.0], [nan, -INF, -5.0], [nan, nan, nan], [-INF, -INF, -INF], [-0.0, 0.0, -1.0]])
    score, ids = argmax_lowest(scores)
    assert ids.tolist() == [1, 2, 0, 0, 0] and score.tolist() == [3.0, -5.0, -INF, -INF, 0.0]
    score, ids = argmax_lowest(scores.bfloat16())
    assert score.dtype == torch.float32 and ids.tolist() == [1, 2, 0, 0, 0]


def test_argmax_ties_in_long_rows():
    scores = torch.zeros(3, 5003)
    scores[0, 1000:] = 1.0
    scores[1, 5002] = 1.0
    assert argmax_lowest(scores)[1].tolist() == [1000, 5002, 0]


def test_chain_accept_exhaustively():
    for width in (1, 2, 4):
        for pattern in itertools.product((0, 1), repeat=width - 1):
            targets = torch.arange(10, 10 + width)
            drafts = [int(targets[j]) if hit else 99 for j, hit in enumerate(pattern)]
            lens, bonus = chain_accept(torch.tensor([[5, *drafts]]), targets[None])
            expected = (*pattern, 0).index(0)
            assert lens.tolist() == [expected + 1] and bonus.tolist() == [10 + expected]


def test_chain_accept_batch():
    candidates = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 9, 3]])
    targets = torch.tensor([[2, 3, 4], [2, 9, 4], [2, 3, 4]])
    lens, bonus = chain_accept(candidates, targets)
    assert lens.tolist() == [3, 2, 1] and bonus.tolist() == [4, 9, 2]


# --- distribution ----------------------------------------------------------------------------------------------------

VOCAB = 8
FILTERS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}]


def toy_distribution(logits, temperature, top_k=-1, top_p=1.0, min_p=0.0):
    p = (logits.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    keep = torch.zeros_like(p, dtype=torch.bool)
    keep[order[: top_k if top_k > 0 else None]] = True
    p = torch.where(keep, p, 0) / p[keep].sum()
    keep[order] &= (p[order].cumsum(0) - p[order]) < top_p
    keep &= p >= min_p * p.max()
    return torch.where(keep, p, 0) / p[keep].sum()


def chi_square_fits(counts, p):
    """Counts lie on the support only, and within 5 sigma of the chi-square of their expectation."""
    assert (counts[p == 0] == 0).all()
    support = p > 0
    expected = p[support] * counts.sum()
    statistic = ((counts[support] - expected) ** 2 / expected).sum().item()
    freedom = int(support.sum()) - 1
    return statistic <= freedom + 5 * (2 * freedom) ** 0.5 + 1e-9


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("draft", [0, 5])
def test_sampled_verify_draws_from_the_target(filters, draft):
    """First token ~ p0 whatever the draft; second, given the draft was accepted, ~ p1; acceptance = p0(draft)."""
    n, temperature = 10000, 1.3
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    columns = {
        "temperature": torch.full((n,), temperature),
        "seed": torch.arange(n) * 7919 + 1,
        **{name: torch.full((n,), value) for name, value in filters.items()},
    }
    inputs = AdjustInputs(
        make_tables(n, VOCAB, **columns),
        torch.arange(n),
        torch.tensor([[0, draft]]).expand(n, 2),
        torch.tensor([40, 41]).repeat(n),
    )
    flags = SamplingFlags(sampled=True, **dict.fromkeys(filters, True))
    verdict = verdict_sampled(logits.repeat(n, 1), inputs, flags, ONE)
    first, second = (toy_distribution(row, temperature, **filters) for row in logits)
    counts = verdict.target_ids[:, 0].bincount(minlength=VOCAB)
    assert chi_square_fits(counts, first)
    accepted = verdict.accept_lens == 2
    assert int(accepted.sum()) == int(counts[draft])
    if accepted.any():
        assert chi_square_fits(verdict.target_ids[accepted, 1].bincount(minlength=VOCAB), second)


def test_coins_never_reject_certainty_or_accept_nothing():
    """A token of probability 1 is always drawn, one of probability 0 never, over many seeds."""
    n = 20000
    logits = torch.full((n, VOCAB), -INF)
    logits[:, 3] = 0.0
    tables = make_tables(n, VOCAB, temperature=torch.ones(n), seed=torch.arange(n))
    inputs = AdjustInputs(tables, torch.arange(n), torch.zeros(n, 1, dtype=torch.int64), torch.zeros(n).long())
    assert (target_ids_sampled(logits, inputs, SamplingFlags(sampled=True), ONE) == 3).all()


# --- speculative = sequential ----------------------------------------------------------------------------------------

V, REQUESTS, PROMPT = 23, 4, 6
WEIGHTS = torch.randn(V, V, V, generator=torch.Generator().manual_seed(1)) * 2


def toy_logits(ids, upto):
    """Logits after ``ids[: upto]``: a function of the last two tokens and the length."""
    return WEIGHTS[ids[upto - 2], ids[upto - 1]].roll(upto % 3)


def toy_tables(start=0, size=V):
    generator = torch.Generator().manual_seed(2)
    rows = REQUESTS + 1
    tables = make_tables(
        rows,
        V,
        temperature=torch.tensor([0.0, 1.0, 0.0, 0.7, 2.0]),
        top_k=torch.tensor([-1, 9, -1, -1, 4]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 1.0, 0.95]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0]),
        seed=torch.tensor([0, 42, 7, -5, 2**60]),
        frequency_penalty=torch.tensor([0.0, 0.5, 1.5, 0.0, -0.5]),
        presence_penalty=torch.tensor([0.0, 0.0, 0.4, 0.0, 1.0]),
        repetition_penalty=torch.tensor([1.0, 1.0, 1.2, 1.3, 1.0]),
        min_len_limit=torch.tensor([0, 20, 0, 30, 12]),
        prompt_seen=torch.rand(rows, V, generator=generator) > 0.8,
        bias=torch.where(torch.rand(rows, V, generator=generator) > 0.7, 1.5, 0.0),
        stop_mask=torch.rand(rows, V, generator=generator) > 0.9,
    )
    return shard_tables(tables, start, size)._replace(counts=torch.zeros(rows, size, dtype=torch.int32))


def generate(rows, width, drafter, tokens=40, reduce=ONE, shard=(0, V)):
    """Generate for request rows with windows of ``width``; ``drafter(row, ids, j)`` proposes the next token."""
    tables = toy_tables(*shard)
    index = torch.tensor(rows)
    texts = [[(row * 5 + i) % V for i in range(PROMPT)] for row in rows]
    while min(len(text) for text in texts) < PROMPT + tokens:
        windows = []
        for row, text in zip(rows, texts, strict=True):
            window = list(text)
            for _ in range(width - 1):
                window.append(drafter(row, window))
            windows.append(window)
        ends = [range(len(text), len(text) + width) for text in texts]
        logits = torch.stack([toy_logits(w, e) for w, end in zip(windows, ends, strict=True) for e in end])
        candidates = torch.tensor([w[end[0] - 1 :] for w, end in zip(windows, ends, strict=True)])
        positions = torch.tensor([e - 1 for end in ends for e in end])
        local = logits[:, shard[0] : shard[0] + shard[1]].contiguous()
        verdict = verdict_sampled(local, AdjustInputs(tables, index, candidates, positions), ALL, reduce)
        commit_counts(tables.counts, index, verdict.target_ids, verdict.accept_lens, shard[0])
        for text, ids, length in zip(texts, verdict.target_ids.tolist(), verdict.accept_lens.tolist(), strict=True):
            text.extend(ids[:length])
    return [text[: PROMPT + tokens] for text in texts]


ROWS = [1, 2, 3, 4]
SEQUENTIAL = generate(ROWS, 1, None)
ORACLE = dict(zip(ROWS, SEQUENTIAL, strict=True))


def draft_wrong(row, ids):
    return (ids[-1] * 3 + row) % V


def draft_right(row, ids):
    known = ORACLE[row]
    return known[len(ids)] if len(ids) < len(known) else 0


def draft_sometimes(row, ids):
    return draft_right(row, ids) if (len(ids) * 7 + row) % 4 else draft_wrong(row, ids)


@pytest.mark.parametrize("width", [2, 3, 5, 8])
@pytest.mark.parametrize("drafter", [draft_wrong, draft_right, draft_sometimes])
def test_speculative_equals_sequential(width, drafter):
    assert generate(ROWS, width, drafter) == SEQUENTIAL


def test_requests_do_not_depend_on_neighbours():
    for row in ROWS:
        assert generate([row], 4, draft_sometimes) == [ORACLE[row]]
    assert generate([4, 1], 3, draft_sometimes) == [ORACLE[4], ORACLE[1]]


def test_requests_differ_and_respect_the_minimum_length():
    stop = toy_tables().stop_mask
    for row, limit in ((1, 20), (3, 30), (4, 12)):
        assert not any(stop[row, token] for token in ORACLE[row][PROMPT:limit])
    assert len({tuple(text[PROMPT:]) for text in SEQUENTIAL}) == len(ROWS)


@pytest.mark.parametrize("shards", [2, 4])
def test_vocabulary_shards_agree(shards):
    edges = [i * V // shards for i in range(shards + 1)]

    def work(rank, reduce):
        shard = (edges[rank], edges[rank + 1] - edges[rank])
        return generate(ROWS, 4, draft_sometimes, tokens=15, reduce=reduce, shard=shard)

    expected = [text[: PROMPT + 15] for text in SEQUENTIAL]
    assert run_sharded(shards, work) == [expected] * shards


# --- variants --------------------------------------------------------------------------------------------------------


def test_greedy_rows_in_a_sampled_batch_equal_the_greedy_variant():
    logits = torch.randn(12, V)
    logits[3, 4:9] = 9.0  # ties
    candidates = torch.randint(0, V, (3, 4))
    temperature = torch.tensor([0.0, 0.0, 1.0, 0.0])
    inputs = AdjustInputs(
        make_tables(4, V, temperature=temperature), torch.tensor([1, 2, 3]), candidates, torch.arange(12)
    )
    mixed, greedy = verdict_sampled(logits, inputs, ALL, ONE), verdict_greedy(logits, candidates, ONE, 0)
    for field in range(3):
        assert torch.equal(mixed[field][[0, 2]], greedy[field][[0, 2]])
    assert not torch.equal(mixed.target_ids[1], greedy.target_ids[1])


@pytest.mark.parametrize("shards", [2, 4])
def test_greedy_shards_lowest_id_wins(shards):
    logits = torch.randint(0, 3, (64, V)).float()
    candidates = torch.randint(0, V, (16, 4))
    edges = [i * V // shards for i in range(shards + 1)]
    expected = verdict_greedy(logits, candidates, ONE, 0)

    def work(rank, reduce):
        return verdict_greedy(logits[:, edges[rank] : edges[rank + 1]], candidates, reduce, edges[rank])

    for got in run_sharded(shards, work):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(target_ids_greedy(logits, ONE, 0), logits.argmax(-1))


def test_extreme_temperatures():
    logits = torch.randn(4, V)
    for value in (1e-6, 1e9):
        tables = make_tables(2, V, temperature=torch.tensor([0.0, value]), seed=torch.tensor([0, 3]))
        inputs = AdjustInputs(tables, torch.tensor([1]), torch.zeros(1, 4, dtype=torch.int64), torch.arange(4))
        ids = target_ids_sampled(logits, inputs, ALL, ONE)
        assert ((ids >= 0) & (ids < V)).all()
        if value < 1:
            assert torch.equal(ids, logits.argmax(-1))


def test_masked_variant():
    logits = torch.randn(6, 40)
    allowed = torch.rand(6, 40) > 0.7
    allowed[:, 11] = True
    padded = torch.cat([allowed, torch.zeros(6, 24, dtype=torch.bool)], dim=1).view(6, 2, 32).long()
    words = (padded << torch.arange(32)).sum(-1)
    mask = torch.where(words >= 2**31, words - 2**32, words).int()
    tables = make_tables(3, 40, temperature=torch.tensor([0.0, 1.0, 0.0]), seed=torch.tensor([0, 5, 0]))
    inputs = AdjustInputs(tables, torch.tensor([1, 2]), torch.zeros(2, 3, dtype=torch.int64), torch.arange(6), mask)
    ids = verdict_masked(logits, inputs, ALL, ONE).target_ids.flatten()
    assert allowed[torch.arange(6), ids].all()
    assert torch.equal(ids[3:], logits.masked_fill(~allowed, -INF).argmax(-1)[3:])
    with pytest.raises(ValueError, match="vocab_mask"):
        verdict_masked(logits, inputs._replace(vocab_mask=None), ALL, ONE)


def test_padded_rows_are_greedy_and_harmless():
    tables = make_tables(3, V, temperature=torch.tensor([0.0, 1.0, 1.0]))
    inputs = AdjustInputs(
        tables, torch.tensor([0, 2]), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([0, 1, 4, 5])
    )
    logits = torch.randn(4, V)
    logits[:2] = torch.nan
    padded = verdict_sampled(logits, inputs, ALL, ONE)
    alone = verdict_sampled(
        logits[2:],
        inputs._replace(rows=inputs.rows[1:], candidates=inputs.candidates[1:], positions=inputs.positions[2:]),
        ALL,
        ONE,
    )
    assert padded.target_ids[0].tolist() == [0, 0]
    assert torch.equal(padded.target_ids[1:], alone.target_ids)


def test_no_host_read():
    with FakeTensorMode():
        rows = torch.zeros(2, dtype=torch.int64)
        mask = torch.zeros(6, 2, dtype=torch.int32)
        candidates, positions = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
        inputs = AdjustInputs(make_tables(4, 64), rows, candidates, positions, mask)
        for verdict in (
            verdict_greedy(torch.zeros(6, 64), candidates, ONE, 0),
            verdict_sampled(torch.zeros(6, 64), inputs._replace(vocab_mask=None), ALL, ONE),
            verdict_masked(torch.zeros(6, 64), inputs, ALL, ONE),
        ):
            assert verdict.target_ids.shape == (2, 3) and verdict.accept_lens.shape == verdict.bonus.shape == (2,)
