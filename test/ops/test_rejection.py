"""p/q rejection over vocabulary shards: the same verdict to the bit, and no host read."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ops.sampling_tables import make_tables, shard_tables
from ops.shard_threads import run_sharded
from sgling_kernel.sampling import AdjustInputs, SamplingFlags, SamplingTables, SingleShard
from sgling_kernel.verdict import draw_draft, round_seed, verdict_rejection

ROWS, WIDTH, VOCAB = 6, 5, 64
FLAGS = SamplingFlags(sampled=True, top_k=True, top_p=True)


def tables() -> SamplingTables:
    return make_tables(
        ROWS + 1,
        VOCAB,
        temperature=torch.tensor([0, 1, 0.7, 0, 2, 1, 0.3]),
        top_k=torch.tensor([-1, -1, 9, -1, -1, 20, -1]),
        top_p=torch.tensor([1, 1, 1, 1, 0.8, 0.95, 1]),
        seed=torch.arange(ROWS + 1) * 7919,
    )


def case(seed: int):
    """(tables, candidates, target logits, draft logits, starts, limits) of drafts that follow the target roughly."""
    generator = torch.Generator().manual_seed(seed)
    table, starts = tables(), torch.randint(0, 90, (ROWS,), generator=generator)
    rows = torch.arange(1, ROWS + 1)
    target = torch.randn(ROWS, WIDTH, VOCAB, generator=generator) * 2
    draft = target[:, :-1] + 0.5 * torch.randn(ROWS, WIDTH - 1, VOCAB, generator=generator)
    seeds = round_seed(table.seed[rows], starts, "draft")
    drafts = [draw_draft(draft[:, k], table.temperature[rows], seeds, starts + k, 0)[1] for k in range(WIDTH - 1)]
    root = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
    limits = torch.randint(0, WIDTH, (ROWS,), generator=generator)
    return table, torch.cat((root, torch.stack(drafts, -1)), -1), target.flatten(0, 1), draft, starts, limits


def judge(parts, reduce, start: int = 0, size: int = VOCAB):
    table, candidates, target, draft, starts, limits = parts
    positions = (starts[:, None] + torch.arange(WIDTH)).flatten()
    inputs = AdjustInputs(shard_tables(table, start, size), torch.arange(1, ROWS + 1), candidates, positions)
    local = slice(start, start + size)
    return verdict_rejection(target[:, local], draft[..., local], starts, limits, inputs, FLAGS, reduce)


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_agree_to_the_bit(shards):
    seen, size = set(), VOCAB // shards
    for seed in range(20):
        parts = case(seed)
        whole = judge(parts, SingleShard())
        for verdict in run_sharded(shards, lambda rank, reduce, mine=parts: judge(mine, reduce, rank * size, size)):
            assert all(map(torch.equal, verdict, whole))
        assert (whole.accept_lens <= parts[-1] + 1).all() and (whole.accept_lens >= 1).all()
        seen |= set(whole.accept_lens.tolist())
    assert seen == set(range(1, WIDTH + 1))


def test_no_host_read():
    with FakeTensorMode():
        zeros = torch.zeros(ROWS, dtype=torch.int64)
        parts = (tables(), torch.zeros(ROWS, WIDTH, dtype=torch.int64), torch.zeros(ROWS * WIDTH, VOCAB),
                 torch.zeros(ROWS, WIDTH - 1, VOCAB), zeros, zeros)  # fmt: skip
        assert judge(parts, SingleShard()).target_ids.shape == (ROWS, WIDTH)
