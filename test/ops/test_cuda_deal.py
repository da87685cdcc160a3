"""How walks of experts deal tiles to CTAs: each tile once, in order, evenly; by number as one after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sgling_kernel import cuda

pytestmark = pytest.mark.usefixtures("emulated_cuda")

SOURCE = Path(__file__).parent / "cuda" / "deal.cu"


def dealt(ids: Tensor, experts: int, tiles: int, shared: bool, ctas: int) -> list[list[list[tuple[int, int]]]]:
    """[by number, one by one, by runs][CTA]: (expert, tile) in order."""
    room = (len(ids.unique()) + 1) * tiles
    tables = torch.zeros(3, ctas, room, 3, dtype=torch.int32)
    cuda.launch(cuda.function(SOURCE, "deal"), *tables, ids, ids.numel(), experts, tiles, int(shared), ctas, room)
    return [
        [[(e, first + i) for e, first, count in lines if count for i in range(count)] for lines in table]
        for table in tables.tolist()
    ]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ctas", [1, 2, 7, 33, 132])
@pytest.mark.parametrize(("experts", "rows", "tiles"), [(512, 3, 24), (512, 1, 160), (64, 2, 4), (1024, 4, 5)])
def test_every_tile_goes_to_one_cta_in_order(experts, rows, tiles, ctas, shared):
    ids = torch.rand(rows, experts).topk(8).indices
    ids[0, 3] = -1
    by_number, one_by_one, runs = dealt(ids, experts, tiles, shared, ctas)
    assert by_number == one_by_one == runs
    chosen = [e for e in ids.unique().tolist() if e >= 0]
    every = {expert: [tile for cta in runs for e, tile in cta if e == expert] for expert in [-1, *chosen]}
    assert every.pop(-1) == (list(range(tiles)) if shared else [])
    assert all(found == list(range(tiles)) for found in every.values())
    assert sum(map(len, runs)) == (len(chosen) + shared) * tiles
    assert all(cta == sorted(cta) for cta in runs)
    sizes = [len(cta) for cta in runs]
    if len(chosen) * tiles >= ctas:
        assert max(sizes) - min(sizes) <= 1


def test_what_division_by_multiplication_cannot_deal_is_refused():
    ids = torch.zeros(1, 1, dtype=torch.int64)
    for experts, tiles, ctas in [(1025, 1, 1), (8, 1024, 1), (8, 1, 1024), (1024, 1000, 132)]:
        with pytest.raises(RuntimeError):
            dealt(ids, experts, tiles, False, ctas)
