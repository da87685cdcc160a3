"""Adjustments, filters and logprobs: against sorted textbook forms, over shards, alone and in a batch."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ops.sampling_tables import make_tables, shard_tables
from ops.shard_threads import run_sharded
from sgling_kernel.noise import gumbel_noise
from sgling_kernel.sampling import (
    AdjustInputs,
    SamplingFlags,
    SingleShard,
    adjust_logits,
    commit_counts,
    target_scores,
    token_logprobs,
    top_logprobs,
)

ALL = SamplingFlags(*[True] * 7)
FILTERS = SamplingFlags(sampled=True, top_k=True, top_p=True, min_p=True)
INF = float("inf")


def filtered(logits, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, flags=FILTERS):
    """Which tokens survive, bool [N, V]: noise 0 leaves -inf exactly at the filtered ones."""
    n = logits.shape[0]

    def column(value, dtype=torch.float32):
        return torch.full((n,), value, dtype=dtype)

    scores = target_scores(
        logits,
        column(temperature),
        column(top_k, torch.int64),
        column(top_p),
        column(min_p),
        torch.zeros_like(logits),
        SingleShard(),
        flags,
    )
    return scores > -INF


def textbook(logits, temperature, top_k, top_p, min_p):
    """Sort-based filter of one row in float64: top-k, renormalise, top-p, renormalise, min-p."""
    p = (logits.double() / temperature).softmax(-1)
    order = p.sort(descending=True, stable=True).indices
    keep = torch.zeros_like(p, dtype=torch.bool)
    keep[order[: top_k if top_k > 0 else None]] = True
    p = torch.where(keep, p, 0) / p[keep].sum()
    before = torch.zeros_like(p)
    before[order] = p[order].cumsum(0) - p[order]
    keep &= before < top_p
    p = torch.where(keep, p, 0) / p[keep].sum()
    return keep & (p >= min_p * p.max())


CASES = [(1.0, 5, 1.0, 0.0), (0.7, -1, 0.9, 0.0), (1.5, -1, 1.0, 0.05), (0.8, 40, 0.6, 0.02), (1.0, 10**9, 1e-9, 0.0)]


@pytest.mark.parametrize("temperature,top_k,top_p,min_p", CASES)
def test_filters_equal_sorted_textbook(temperature, top_k, top_p, min_p):
    logits = torch.randn(6, 500) * 3
    kept = filtered(logits, temperature, top_k, top_p, min_p)
    for i in range(6):
        assert torch.equal(kept[i], textbook(logits[i], temperature, top_k, top_p, min_p))


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert filtered(torch.randn(2, 9), top_k=10).all()


def test_ties_at_the_threshold_are_all_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, -0.0, 0.0]])
    assert filtered(logits, top_k=2)[0].tolist() == [False, True, True, True, False, False]
    assert filtered(logits, top_k=5)[0].tolist() == [True] * 6


def test_min_p_one_keeps_only_the_best():
    logits = torch.randn(5, 300)
    kept = filtered(logits, temperature=1.5, min_p=1.0)
    assert kept.sum(-1).tolist() == [1] * 5 and torch.equal(kept.int().argmax(-1), logits.argmax(-1))


def test_top_p_one_keeps_tokens_without_mass():
    logits = torch.tensor([[0.0, -200.0, -INF]])
    assert filtered(logits, top_p=1.0)[0].tolist() == [True, True, False]
    assert filtered(logits, top_p=0.999999)[0].tolist() == [True, False, False]


def random_batch(n=9, vocab=1003):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(n, vocab, generator=generator) * 4
    logits[0, :100] = 2.5  # ties across shards
    logits[1] = 0.0
    logits[2, 7] = torch.nan
    logits[3, 8] = INF
    logits[4] = -INF
    parameters = (
        torch.tensor([1.0, 0.7, 1e-6, 1e9, 1.0, 0.0, 2.0, 0.9, 1.1]),
        torch.tensor([50, -1, 3, 1000, 20, -1, 1, 2**62, 7]),
        torch.tensor([0.9, 0.5, 1.0, 0.999, 0.3, 1.0, 1.0, 0.95, 1e-6]),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.02, 1.0]),
    )
    noise = gumbel_noise(torch.arange(n), torch.arange(n) * 3, 0, vocab)
    return logits, parameters, noise


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_give_the_bits_of_a_single_shard(shards):
    logits, parameters, noise = random_batch()
    full = target_scores(logits, *parameters, noise, SingleShard(), FILTERS)
    edges = [i * 1003 // shards for i in range(shards + 1)]

    def work(rank, reduce):
        part = slice(edges[rank], edges[rank + 1])
        return target_scores(logits[:, part], *parameters, noise[:, part], reduce, FILTERS)

    parts = torch.cat(run_sharded(shards, work), dim=-1)
    assert torch.equal(parts[[0, 1, 3, 4, 5, 6, 7, 8]], full[[0, 1, 3, 4, 5, 6, 7, 8]])
    assert torch.equal(parts[2].nan_to_num(), full[2].nan_to_num())


def test_row_alone_equals_row_in_batch():
    logits, parameters, noise = random_batch()
    full = target_scores(logits, *parameters, noise, SingleShard(), FILTERS)
    for i in range(len(logits)):
        one = slice(i, i + 1)
        alone = target_scores(logits[one], *(p[one] for p in parameters), noise[one], SingleShard(), FILTERS)
        assert torch.equal(alone.view(torch.int32), full[one].view(torch.int32))


def test_extreme_rows_never_become_nan():
    logits, parameters, noise = random_batch()
    scores = target_scores(logits, *parameters, noise, SingleShard(), FILTERS)
    assert not scores.isnan().any() and (scores[[0, 1, 2, 3, 6, 7, 8]].amax(-1) > -INF).all()


def test_temperature_zero_rows_are_the_logits():
    logits, (temperature, *rest), noise = random_batch()
    temperature = torch.where(torch.arange(9) % 2 == 0, 0.0, temperature)
    scores = target_scores(logits, temperature, *rest, noise, SingleShard(), FILTERS)
    assert torch.equal(scores[::2].view(torch.int32), logits[::2].view(torch.int32))
    assert target_scores(logits, temperature, *rest, None, SingleShard(), FILTERS) is logits


def test_unneeded_filters_can_be_skipped():
    """Neutral parameters give the same bits whether the flag is set (for a neighbour) or not."""
    logits, noise = torch.randn(3, 64), torch.randn(3, 64)
    neutral = (torch.full((3,), 0.9), torch.full((3,), -1), torch.ones(3), torch.zeros(3))
    skipped = target_scores(logits, *neutral, noise, SingleShard(), SamplingFlags(sampled=True))
    assert torch.equal(skipped, target_scores(logits, *neutral, noise, SingleShard(), FILTERS))


# --- adjust_logits ---------------------------------------------------------------------------------------------------


def adjust_case(rows=4, vocab=33, batch=3, width=4):
    generator = torch.Generator().manual_seed(9)

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    tables = make_tables(
        rows,
        vocab,
        frequency_penalty=torch.tensor([0.0, 0.7, -0.4, 2.0]),
        presence_penalty=torch.tensor([0.0, 0.3, 1.1, -2.0]),
        repetition_penalty=torch.tensor([1.0, 1.3, 0.8, 2.0]),
        min_len_limit=torch.tensor([0, 12, 0, 100]),
        counts=(rand(rows, vocab) * 3).int(),
        prompt_seen=rand(rows, vocab) > 0.6,
        bias=torch.where(rand(rows, vocab) > 0.8, rand(rows, vocab) * 10 - 5, 0.0),
        stop_mask=rand(rows, vocab) > 0.9,
    )
    inputs = AdjustInputs(
        tables,
        torch.tensor([3, 1, 2])[:batch],
        torch.randint(0, vocab, (batch, width), generator=generator),
        (torch.tensor([20, 9, 5])[:batch, None] + torch.arange(width)).flatten(),
    )
    return torch.randn(batch * width, vocab, generator=generator), inputs


def adjust_by_loop(logits, inputs):
    """The formulas, one element at a time."""
    tables, out = inputs.tables, logits.clone()
    batch, width = inputs.candidates.shape
    for b in range(batch):
        row = int(inputs.rows[b])
        for j in range(width):
            drafts = inputs.candidates[b, 1 : j + 1].tolist()
            for v in range(logits.shape[1]):
                x = logits[b * width + j, v].clone()
                count = int(tables.counts[row, v]) + drafts.count(v)
                if count or tables.prompt_seen[row, v]:
                    x = x / tables.repetition_penalty[row] if x > 0 else x * tables.repetition_penalty[row]
                x = x - (tables.frequency_penalty[row] * count + tables.presence_penalty[row] * (count > 0))
                x = x + tables.bias[row, v]
                if tables.stop_mask[row, v] and inputs.positions[b * width + j] + 1 < tables.min_len_limit[row]:
                    x = torch.tensor(-INF)
                out[b * width + j, v] = x
    return out


def test_adjust_equals_the_formulas():
    logits, inputs = adjust_case()
    assert torch.equal(adjust_logits(logits, inputs, ALL), adjust_by_loop(logits, inputs))


def test_window_row_equals_a_later_decode_step():
    """Row j with drafts 1..j = a width-1 row after those drafts were committed."""
    logits, inputs = adjust_case()
    window = adjust_logits(logits, inputs, ALL).view(3, 4, -1)
    counts = inputs.tables.counts.clone()
    for j in range(4):
        step = inputs._replace(
            tables=inputs.tables._replace(counts=counts),
            candidates=inputs.candidates[:, j : j + 1],
            positions=inputs.positions.view(3, 4)[:, j],
        )
        assert torch.equal(adjust_logits(logits.view(3, 4, -1)[:, j].contiguous(), step, ALL), window[:, j])
        if j < 3:
            one = torch.ones(3, dtype=torch.int64)
            commit_counts(counts, inputs.rows, inputs.candidates[:, j + 1 : j + 2], one, 0)


def test_min_tokens_limit_is_an_absolute_position():
    tables = make_tables(
        2, 3, min_len_limit=torch.tensor([0, 7]), stop_mask=torch.tensor([[False] * 3, [0, 1, 0]]).bool()
    )
    inputs = AdjustInputs(tables, torch.tensor([1]), torch.zeros(1, 4, dtype=torch.int64), torch.arange(4, 8))
    out = adjust_logits(torch.zeros(4, 3), inputs, SamplingFlags(min_tokens=True))
    assert out[:, 1].tolist() == [-INF, -INF, 0.0, 0.0] and (out[:, ::2] == 0).all()


def test_vocab_mask():
    logits = torch.zeros(2, 40)
    mask = torch.tensor([[0b101, 1], [-1, -1]], dtype=torch.int32)
    inputs = AdjustInputs(
        make_tables(2, 40), torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int64), torch.arange(2), mask
    )
    out = adjust_logits(logits, inputs, SamplingFlags())
    assert (out[0] == 0).nonzero().flatten().tolist() == [0, 2, 32] and (out[1] == 0).all()


def test_neutral_rows_keep_their_bits():
    logits = torch.randn(8, 33)
    logits[0, :6] = torch.tensor([-0.0, 0.0, INF, -INF, torch.nan, 1e-42])
    tables = make_tables(3, 33, counts=torch.ones(3, 33).int(), prompt_seen=torch.ones(3, 33).bool())
    inputs = AdjustInputs(tables, torch.tensor([0, 2]), torch.ones(2, 4, dtype=torch.int64), torch.arange(8))
    assert torch.equal(adjust_logits(logits, inputs, ALL).view(torch.int32), logits.view(torch.int32))


def test_adjust_shards_equal_full():
    logits, inputs = adjust_case()
    mask = torch.randint(-(2**31), 2**31 - 1, (12, 2), dtype=torch.int32)
    inputs = inputs._replace(vocab_mask=mask)
    full = adjust_logits(logits, inputs, ALL)
    for start, size in ((0, 16), (16, 17), (5, 1)):
        part = inputs._replace(tables=shard_tables(inputs.tables, start, size))
        got = adjust_logits(logits[:, start : start + size].contiguous(), part, ALL)
        assert torch.equal(got, full[:, start : start + size])


def test_commit_counts():
    counts = torch.zeros(3, 5, dtype=torch.int32)
    tokens = torch.tensor([[4, 4, 1], [2, 0, 9]])
    commit_counts(counts, torch.tensor([2, 1]), tokens, torch.tensor([2, 3]), 0)
    assert counts.tolist() == [[0] * 5, [1, 0, 1, 0, 0], [0, 0, 0, 0, 2]]
    shard = torch.zeros(3, 2, dtype=torch.int32)
    commit_counts(shard, torch.tensor([2, 1]), tokens, torch.tensor([2, 3]), 4)
    assert shard.tolist() == [[0, 0], [0, 0], [2, 0]]


# --- logprobs --------------------------------------------------------------------------------------------------------


def test_logprobs_equal_log_softmax():
    logits = torch.randn(5, 700) * 6
    reference = logits.double().log_softmax(-1)
    ids = torch.randint(0, 700, (5, 3))
    got = token_logprobs(logits, ids, SingleShard(), 0)
    assert torch.allclose(got.double(), reference.gather(1, ids), atol=2e-6)
    assert torch.equal(token_logprobs(logits, ids[:, 0], SingleShard(), 0), got[:, 0])
    values, best = top_logprobs(logits, 7, SingleShard(), 0)
    expected = reference.topk(7)
    assert torch.equal(best, expected.indices) and torch.allclose(values.double(), expected.values, atol=2e-6)


def test_top_logprobs_ties_and_whole_vocabulary():
    values, ids = top_logprobs(torch.tensor([[1.0, 2.0, 1.0, 2.0, torch.nan]]), 5, SingleShard(), 0)
    assert ids.tolist() == [[1, 3, 0, 2, 4]] and values[0, 4] == -INF
    with pytest.raises(ValueError, match="k = 6"):
        top_logprobs(torch.zeros(1, 5), 6, SingleShard(), 0)


@pytest.mark.parametrize("shards", [2, 4])
def test_logprob_shards_are_exact(shards):
    logits, *_ = random_batch()
    ids = torch.randint(0, 1003, (9, 2))
    edges = [i * 1003 // shards for i in range(shards + 1)]
    one = SingleShard()
    expected = (token_logprobs(logits, ids, one, 0), *top_logprobs(logits, 6, one, 0))

    def work(rank, reduce):
        part = logits[:, edges[rank] : edges[rank + 1]]
        chosen = token_logprobs(part, ids, reduce, edges[rank])
        return (chosen, *top_logprobs(part, 6, reduce, edges[rank]))

    for got in run_sharded(shards, work):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not expected[0].isnan().any()


def test_no_host_read():
    with FakeTensorMode():
        tables = make_tables(4, 64)
        rows = torch.zeros(2, dtype=torch.int64)
        mask = torch.zeros(6, 2, dtype=torch.int32)
        inputs = AdjustInputs(
            tables, rows, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(6, dtype=torch.int64), mask
        )
        x = adjust_logits(torch.zeros(6, 64), inputs, ALL)
        per_row = (tables.temperature[:1].expand(6), torch.zeros(6, dtype=torch.int64), torch.zeros(6), torch.zeros(6))
        assert target_scores(x, *per_row, torch.zeros(6, 64), SingleShard(), FILTERS).shape == (6, 64)
        commit_counts(tables.counts, rows, inputs.candidates, rows, 0)
        assert token_logprobs(x, inputs.positions, SingleShard(), 0).shape == (6,)
        assert top_logprobs(x, 3, SingleShard(), 0)[1].shape == (6, 3)
