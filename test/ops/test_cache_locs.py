"""Slots and positions of a window; padded rows touch only the dummy."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgling_kernel.cache_locs import gather_state_slots, window_locs


def test_window_locs():
    table = torch.arange(1, 41, dtype=torch.int32).view(4, 10)
    locs, positions = window_locs(table, torch.tensor([2, 1]), torch.tensor([3, 7]), 3)
    assert positions.tolist() == [3, 4, 5, 7, 8, 9]
    assert locs.tolist() == [24, 25, 26, 18, 19, 20]
    assert locs.dtype == positions.dtype == torch.int64


def test_padded_row_uses_the_dummy_whatever_its_length():
    table = torch.full((3, 8), 99)
    locs, positions = window_locs(table, torch.tensor([0, 1]), torch.tensor([10**9, 2]), 4)
    assert locs.tolist() == [0, 0, 0, 0, 99, 99, 99, 99]
    assert positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 5]


def test_width_one_and_row_alone():
    table = torch.randint(1, 100, (5, 16))
    rows, starts = torch.tensor([4, 1, 3]), torch.tensor([15, 0, 9])
    locs, positions = window_locs(table, rows, starts, 1)
    assert positions.tolist() == [15, 0, 9] and locs.tolist() == table[rows, starts].tolist()
    alone = window_locs(table, rows[1:2], starts[1:2], 1)
    assert torch.equal(alone[0], locs[1:2])


def test_state_slots():
    assert gather_state_slots(torch.tensor([7, 5, 3]), torch.tensor([2, 0, 1])).tolist() == [3, 0, 5]


def test_no_host_read():
    with FakeTensorMode():
        rows = torch.zeros(2, dtype=torch.int64)
        locs, positions = window_locs(torch.zeros(3, 8, dtype=torch.int32), rows, rows, 4)
        slots = gather_state_slots(torch.zeros(3, dtype=torch.int64), rows)
    assert locs.shape == positions.shape == (8,) and slots.shape == (2,)
