"""SamplingBuffers: rows are installed, isolated, cleared, saved and restored; shards hold slices."""

import pytest
import torch

from sgling.srt.sampling.sampling_buffers import SamplingBuffers
from sgling.srt.sampling.sampling_params import SamplingParams
from sgling_kernel.sampling import AdjustInputs, SamplingFlags, adjust_logits, commit_counts

V = 20
WIDE = ("counts", "prompt_seen", "bias", "stop_mask")
BUSY = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    repetition_penalty=1.2,
    min_new_tokens=3,
    logit_bias={4: 2.0, 15: -100.0},
    stop_token_ids=[7],
)
GREEDY = SamplingParams(temperature=0.0)


def busy_buffers(row=2, **shard):
    buffers = SamplingBuffers(4, shard.pop("size", V), "cpu", **shard)
    buffers.set_row(row, BUSY, [1, 1, 16], seed=-9, eos_ids=[0, 19], min_len_limit=6)
    return buffers


def row_state(buffers, row):
    return [table[row].tolist() for table in buffers.tables if isinstance(table, torch.Tensor)]


def test_set_row_writes_everything():
    tables = busy_buffers().tables
    got = {name: getattr(tables, name)[2].item() for name in tables._fields[:9]}
    assert got == pytest.approx(
        {
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.1,
            "seed": -9,
            "frequency_penalty": 0.5,
            "presence_penalty": -0.5,
            "repetition_penalty": 1.2,
            "min_len_limit": 6,
        }
    )
    assert tables.prompt_seen[2].nonzero().flatten().tolist() == [1, 16]
    assert tables.stop_mask[2].nonzero().flatten().tolist() == [0, 7, 19]
    assert tables.bias[2, 4] == 2.0 and tables.bias[2, 15] == -100.0 and tables.bias[2].count_nonzero() == 2
    assert tables.counts[2].sum() == 0
    assert [tables.temperature.dtype, tables.top_k.dtype, tables.seed.dtype] == [
        torch.float32,
        torch.int64,
        torch.int64,
    ]


def test_wide_tables_are_lazy():
    buffers = SamplingBuffers(3, V, "cpu")
    small = buffers.nbytes()
    buffers.set_row(1, SamplingParams(temperature=0.5, min_new_tokens=1), [1], 0, [2], 5)
    assert buffers.tables.counts is None and buffers.tables.bias is None and buffers.tables.stop_mask is not None
    assert buffers.nbytes() == small + 3 * V
    buffers.allocate(SamplingFlags(*[True] * 7))
    kept = buffers.tables
    assert all(getattr(kept, name) is not None for name in WIDE) and kept.stop_mask[1, 2]
    buffers.allocate(SamplingFlags(*[True] * 7))
    assert all(getattr(buffers.tables, name) is getattr(kept, name) for name in WIDE)  # addresses stay


def test_flags():
    buffers = busy_buffers()
    buffers.set_row(1, GREEDY, [1], 0, [2], 5)
    buffers.set_row(3, SamplingParams(logit_bias={1: 1.0}), [1], 0, [2], 5)
    assert buffers.flags_for([0, 1]) == SamplingFlags()
    assert buffers.flags_for([1, 3]) == SamplingFlags(sampled=True, logit_bias=True)
    assert buffers.flags_for([3, 2, 0]) == SamplingFlags(*[True] * 7)
    assert buffers.flags_for([]) == SamplingFlags()


def test_other_rows_are_untouched():
    buffers = busy_buffers()
    before = [row_state(buffers, row) for row in (0, 1, 2)]
    buffers.set_row(3, BUSY, [3], 1, [4], 9)
    buffers.clear_row(3)
    assert [row_state(buffers, row) for row in (0, 1, 2)] == before


def test_reused_row_keeps_nothing():
    buffers = busy_buffers()
    neutral = row_state(buffers, 1)
    commit_counts(buffers.tables.counts, torch.tensor([2]), torch.tensor([[3]]), torch.tensor([1]), 0)
    buffers.set_row(2, GREEDY, [5], 0, [2], 50)
    assert row_state(buffers, 2) == neutral and buffers.flags_for([2]) == SamplingFlags()


def test_dummy_row_and_range():
    buffers = busy_buffers()
    for row in (0, 4, -1):
        with pytest.raises(IndexError, match="row"):
            buffers.clear_row(row)
    assert row_state(buffers, 0) == row_state(buffers, 1)


def test_snapshot_restores_into_another_row():
    buffers = busy_buffers()
    commit_counts(buffers.tables.counts, torch.tensor([2]), torch.tensor([[3, 3]]), torch.tensor([2]), 0)
    state, flags = row_state(buffers, 2), buffers.flags_for([2])
    snapshot = buffers.snapshot_row(2)
    buffers.set_row(2, SamplingParams(logit_bias={1: 1.0}), [9], 3, [], 0)
    buffers.restore_row(1, snapshot)
    assert row_state(buffers, 1) == state and buffers.flags_for([1]) == flags
    fresh = SamplingBuffers(4, V, "cpu")
    fresh.restore_row(3, snapshot)
    assert row_state(fresh, 3) == state


def test_snapshot_of_a_plain_row_is_small():
    buffers = busy_buffers()
    buffers.set_row(1, GREEDY, [1], 0, [2], 5)
    snapshot = buffers.snapshot_row(1)
    assert all(getattr(snapshot, name) is None for name in WIDE)


@pytest.mark.parametrize("start,size", [(0, 8), (8, 12), (5, 1)])
def test_shard_is_a_slice(start, size):
    full, part = busy_buffers().tables, busy_buffers(vocab_start=start, size=size).tables
    assert part.vocab_start == start
    for name in WIDE:
        assert torch.equal(getattr(part, name), getattr(full, name)[:, start : start + size])


def test_neutral_neighbour_keeps_its_logits():
    buffers = busy_buffers()
    buffers.set_row(1, GREEDY, [1], 0, [2], 5)
    logits = torch.randn(2, V)
    inputs = AdjustInputs(
        buffers.tables, torch.tensor([1, 2]), torch.zeros(2, 1, dtype=torch.int64), torch.tensor([3, 3])
    )
    out = adjust_logits(logits, inputs, buffers.flags_for([1, 2]))
    assert torch.equal(out[0].view(torch.int32), logits[0].view(torch.int32)) and not torch.equal(out[1], logits[1])
    assert (out[1, [0, 7, 19]] == -torch.inf).all()
