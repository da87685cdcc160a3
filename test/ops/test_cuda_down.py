"""Down product in CUDA C++: the walking form has the bits of the other for every routing; emulated on a CPU."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ops.kda_case import same_bits
from sgling_kernel import cuda as runtime
from sgling_kernel.moe import ExpertWeights, cuda

pytestmark = pytest.mark.usefixtures("emulated_cuda")

DIM, WIDTH, EXPERTS, TOP = 192, 64, 12, 4
SOURCE = Path(cuda.__file__).parent / "down_walk.cuh"


@pytest.fixture(autouse=True)
def _unwritten_values_are_nan(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: torch.full(size, math.nan, **kind))


def weights(*lead: int, dim: int = DIM, width: int = WIDTH) -> ExpertWeights:
    """Experts of which only w2 counts."""
    w2 = (torch.randn(*lead, dim, width) / width**0.5).bfloat16()
    return ExpertWeights(torch.zeros(*lead, 0, dim).bfloat16(), w2, None)


def hidden_of(rows: int, slots: int, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, slots, width).bfloat16()


def distinct_ids(rows: int, experts: int = EXPERTS, top: int = TOP) -> Tensor:
    return torch.rand(rows, experts).topk(top).indices


def with_gaps(ids: Tensor, experts: int = EXPERTS) -> Tensor:
    """A fifth of the ids name no expert."""
    nobody = torch.tensor([-1, experts, -(2**40), 2**40])[torch.randint(4, ids.shape)]
    return torch.where(torch.rand(ids.shape) < 0.2, nobody, ids)


def one_expert(rows: int) -> Tensor:
    """All rows on the same experts, one of them several times in a row."""
    return torch.tensor([7, 3, 7, 11]).expand(rows, -1).contiguous()


ROUTINGS = {
    "distinct": distinct_ids,
    "gaps": lambda rows: with_gaps(distinct_ids(rows)),
    "one expert": one_expert,
    "nobody": lambda rows: torch.full((rows, TOP), -1),
    "last expert": lambda rows: torch.full((rows, TOP), EXPERTS - 1),
}


def expected(hidden: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, ids: Tensor) -> Tensor:
    """Products in fp64, zeros where an id names no expert."""
    named = (ids >= 0) & (ids < len(experts.w2))
    routed = torch.einsum("nki,nkdi->nkd", hidden[:, : ids.shape[1]].double(), experts.w2[ids * named].double())
    routed = torch.where(named[..., None], routed, 0)
    if shared is None:
        return routed
    return torch.cat((routed, (hidden[:, -1].double() @ shared.w2.double().T)[:, None]), 1)


def assert_both_forms(hidden: Tensor, experts: ExpertWeights, shared: ExpertWeights | None, ids: Tensor, *ctas: int):
    each = cuda.down(hidden, experts, shared, ids, 0)
    torch.testing.assert_close(each.double(), expected(hidden, experts, shared, ids), atol=1e-5, rtol=1e-5)
    for count in ctas:
        assert same_bits(cuda.down(hidden, experts, shared, ids, count), each), count


@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("rows", [1, 8, 9, 20])
def test_both_forms_have_the_same_bits(rows, routing, with_shared):
    shared = weights() if with_shared else None
    hidden, ids = hidden_of(rows, TOP + with_shared), ROUTINGS[routing](rows)
    assert_both_forms(hidden, weights(EXPERTS), shared, ids, 1, 3, 40)


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_of_a_step(seed):
    generator = torch.Generator().manual_seed(seed)

    def choose(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows, top, experts, dim = choose(1, 21), choose(1, 9), choose(8, 70), 64 * choose(1, 4)
    ids = with_gaps(distinct_ids(rows, experts, top), experts)
    hidden = hidden_of(rows, top + 1)
    ctas = [choose(1, 3), choose(3, 20), choose(20, 133)]
    assert_both_forms(hidden, weights(experts, dim=dim), weights(dim=dim), ids, *ctas)


@pytest.mark.parametrize("width", [32, 96, 128, 192, 256, 384])
def test_widths_of_one_batch_and_of_several(width):
    hidden, ids = hidden_of(10, 3, width), torch.tensor([[0, 1], [1, 0]]).repeat(5, 1)
    assert_both_forms(hidden, weights(2, dim=128, width=width), weights(dim=128, width=width), ids, 1, 2)


def test_the_most_rows_and_the_most_experts():
    ids = distinct_ids(160, 1024, 8)
    experts, shared = weights(1024, dim=64, width=32), weights(dim=64, width=32)
    assert_both_forms(hidden_of(160, 9, 32), experts, shared, ids, 7)
    more = weights(1025, dim=64, width=32)
    with pytest.raises(RuntimeError):
        cuda.down(hidden_of(9, 9, 32), more, shared, ids[:9], 7)
    hidden = hidden_of(9, 9, 32)
    assert same_bits(cuda.down(hidden, more, shared, ids[:9]), cuda.down(hidden, more, shared, ids[:9], 0))


def test_a_row_notices_neither_neighbours_nor_the_form():
    experts, shared, ids, hidden = weights(EXPERTS), weights(), distinct_ids(19), hidden_of(19, TOP + 1)
    ids[4:16] = ids[2]
    hidden[5], hidden[7] = math.nan, hidden[7] * 1e30
    together = cuda.down(hidden, experts, shared, ids, 3)
    order = torch.randperm(19)
    assert same_bits(cuda.down(hidden[order], experts, shared, ids[order], 2), together[order])
    for row in range(19):
        one = slice(row, row + 1)
        for ctas in (0, 2):
            assert same_bits(cuda.down(hidden[one], experts, shared, ids[one], ctas), together[one])


def test_experts_nobody_chose_are_not_read():
    experts, ids, hidden = weights(EXPERTS), with_gaps(distinct_ids(9) % 7), hidden_of(9, TOP)
    clean = cuda.down(hidden, experts, None, ids, 3)
    experts.w2[7:] = math.nan
    assert same_bits(cuda.down(hidden, experts, None, ids, 3), clean)


def test_the_form_is_picked_by_rows(monkeypatch):
    forms, launch = [], runtime.launch
    monkeypatch.setattr(runtime, "launch", lambda *args: (forms.append(args[-1]), launch(*args)))
    few = cuda._WALK_ROWS - 1
    for rows in (few, few + 1):
        cuda.down(hidden_of(rows, TOP + 1), weights(EXPERTS), weights(), distinct_ids(rows))
    assert forms == [0, cuda._EMULATED_CTAS]


def test_a_gpu_walks_where_its_shared_memory_holds_all_rings(monkeypatch):
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    walkers = cuda._walkers.__wrapped__
    held, gpu = cuda._WALK_DOWN_TILES * 16 * 192 * 2 + cuda._WALK_DOWN_PLACE_BYTES, torch.device("cuda")
    assert walkers(gpu, held) == 132 and walkers(gpu, 2 * held) == 0
    monkeypatch.setattr(runtime, "has_bulk_copies", lambda: False)
    assert walkers(gpu, held) == 0


def test_binding_and_source_agree_about_the_rings():
    warps, stages = re.search(r"WALK_WARPS = (\d+), WALK_STAGES = (\d+)", SOURCE.read_text()).groups()
    assert int(warps) * int(stages) == cuda._WALK_DOWN_TILES
