"""The walk of CUDA C++ experts against their other form, bit by bit: how tiles and tokens are dealt; emulated GPU.

The other form (a CTA per pair and tile) is checked against fp64 products in test_cuda_experts.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.kda_case import same_bits
from ops.test_cuda_experts import DIM, layer, rows_of
from sgling_kernel.moe import ExpertWeights, cuda

pytestmark = pytest.mark.usefixtures("emulated_cuda")

Case = tuple[Tensor, ExpertWeights, ExpertWeights | None, Tensor]


def named(ids: Tensor, experts: ExpertWeights, shared: ExpertWeights | None) -> Tensor:
    """[N, slots]: slots whose values are defined."""
    valid = (ids >= 0) & (ids < experts.w13.shape[0])
    return torch.cat((valid, torch.ones(ids.shape[0], int(shared is not None), dtype=torch.bool)), 1)


def assert_walk_has_the_bits_of_pairs(case: Case, *counts: int) -> None:
    x, experts, shared, ids = case
    defined = named(ids, experts, shared)
    want = cuda.up(x, experts, shared, ids, 0)[defined]
    for ctas in counts:
        got = cuda.up(x, experts, shared, ids, ctas)[defined]
        assert same_bits(got, want), ctas


def case_of(rows: int, ids: Tensor | None = None, *, shared: bool = True, width: int = 64, experts: int = 8) -> Case:
    routed, alone = layer(width=width, experts=experts)
    x, _, chosen = rows_of(rows, experts=experts)
    return x, routed, alone if shared else None, chosen if ids is None else ids


@pytest.mark.parametrize("tokens", [7, 8, 9, 16, 17, 25])
def test_an_expert_of_more_tokens_than_a_pass_takes(tokens):
    """Beside two others of few tokens, so that a CTA comes to it and leaves it."""
    ids = torch.full((tokens, 1), 3)
    ids[-1], ids[0] = 5, 1
    assert_walk_has_the_bits_of_pairs(case_of(tokens, ids), 1, 2, 3, 7)


@pytest.mark.parametrize("rows", [17, 160])
def test_a_shared_expert_of_many_rows(rows):
    ids = torch.randint(8, (rows, 2)) if rows == 17 else torch.randint(200, (rows, 1))  # most name no expert
    assert_walk_has_the_bits_of_pairs(case_of(rows, ids, width=16), 1, 3)


@pytest.mark.parametrize("shared", [True, False])
def test_every_number_of_ctas(shared):
    """From one with all tiles to more than there are; 5 experts of 8 tiles."""
    case = case_of(2, torch.tensor([[0, 2, 7], [2, 4, 6]]), shared=shared)
    assert_walk_has_the_bits_of_pairs(case, *range(1, 20), 40, 41, 48, 50)


@pytest.mark.parametrize("shared", [True, False])
def test_fewer_tiles_than_stages(shared):
    """One expert of two tiles: none, one or two for a CTA."""
    case = case_of(1, torch.tensor([[6, 6]]), shared=shared, width=16)
    assert_walk_has_the_bits_of_pairs(case, 1, 2, 3, 5)


@pytest.mark.parametrize("ids", [-1, 8, 2**40, -(2**40)])
def test_no_id_names_an_expert(ids):
    """Only the shared expert's slots are written; without one, nothing is."""
    case = case_of(3, torch.full((3, 4), ids))
    assert_walk_has_the_bits_of_pairs(case, 1, 5)
    x, experts, _, chosen = case
    experts.w13[:] = math.nan
    got = cuda.up(x, experts, case[2], chosen, 5)
    assert bool(got[:, -1].isfinite().all())
    cuda.up(x, experts, None, chosen, 5)


def test_experts_of_every_word_of_the_bit_set():
    """1,024 experts of one tile; the chosen ones come in no order."""
    ids = torch.randperm(1024)[:60].view(15, 4)
    ids[0] = torch.tensor([1023, 0, 31, 32])
    case = case_of(15, ids, width=8, experts=1024)
    assert_walk_has_the_bits_of_pairs(case, 1, 4, 100)


@pytest.mark.parametrize("seed", range(6))
def test_random_routings(seed):
    """Uniform and crowded ones, ids without an expert among them."""
    torch.manual_seed(seed)
    rows, top = int(torch.randint(1, 18, ())), int(torch.randint(1, 9, ()))
    ids = torch.randint(-1, 3 + seed * 2, (rows, top))
    case = case_of(rows, ids, shared=seed % 3 != 0, width=(8, 40, 64)[seed % 3], experts=8)
    assert_walk_has_the_bits_of_pairs(case, 1, int(torch.randint(2, 12, ())), 33)
    assert case[0].shape[1] == DIM
