"""Relay buffers: scatter by row, gather by row, poison after use."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgling_kernel.relay import gather_relay, poison_relay, scatter_relay


def test_round_trip_in_any_order():
    lens, hidden = torch.zeros(5, dtype=torch.int64), torch.zeros(5, 3)
    value = torch.randn(2, 3)
    scatter_relay((lens, hidden), torch.tensor([4, 2]), (torch.tensor([40, 20]), value))
    got_lens, got_hidden = gather_relay((lens, hidden), torch.tensor([2, 4, 0]))
    assert got_lens.tolist() == [20, 40, 0]
    assert torch.equal(got_hidden[:2], value.flip(0))
    assert lens.tolist() == [0, 0, 20, 0, 40]


def test_gathered_values_outlive_the_buffer():
    buffer = torch.arange(3)
    (got,) = gather_relay((buffer,), torch.tensor([1]))
    buffer.zero_()
    assert got.tolist() == [1]


def test_padded_rows_only_touch_row_zero():
    buffer = torch.tensor([0, 11, 12])
    scatter_relay((buffer,), torch.tensor([1, 0, 0]), (torch.tensor([5, 6, 7]),))
    assert buffer[1:].tolist() == [5, 12]


def test_dtype_of_the_buffer_wins():
    buffer = torch.zeros(2, 2, dtype=torch.bfloat16)
    scatter_relay((buffer,), torch.tensor([1]), (torch.tensor([[1.0, 2.0]]),))
    assert buffer[1].tolist() == [1.0, 2.0]


def test_poison():
    ids, hidden = torch.arange(3), torch.zeros(3, 2)
    poison_relay((ids, hidden), torch.tensor([2]))
    assert ids.tolist() == [0, 1, -1] and hidden[2].isnan().all() and not hidden[:2].isnan().any()


def test_count_mismatch_is_an_error():
    with pytest.raises(ValueError):
        scatter_relay((torch.zeros(2),), torch.tensor([1]), ())


def test_no_host_read():
    with FakeTensorMode():
        buffers, rows = (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 8)), torch.zeros(2, dtype=torch.int64)
        scatter_relay(buffers, rows, gather_relay(buffers, rows))
        poison_relay(buffers, rows)
