"""Losslessness on a GPU: greedy and seeded ids are those of plain decoding without graphs, whatever helps along."""

from __future__ import annotations

from collections import Counter

import pytest

from gpu.gpu_case import MODELS, oracle, random_drafts, run, write_config

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)


@pytest.fixture(scope="module", params=list(MODELS))
def path(request, tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def truth(path):
    """Plain decoding, one request at a time, no graph."""
    return run(path, width=0, disable_cuda_graph=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_any_width(path, truth, width):
    assert run(path, width=width) == truth


@pytest.mark.parametrize("width", [0, 4])
def test_graphs_change_nothing(path, truth, width):
    assert run(path, width=width, disable_cuda_graph=width > 0) == truth


def test_both_rollbacks(path, truth):
    assert run(path, width=6, linear_rollback="staged") == truth


@pytest.mark.parametrize("width", [0, 3, 6])
def test_inside_a_batch(path, truth, width):
    assert run(path, width=width, batched=True) == truth


@pytest.mark.parametrize("width", [4, 6])
def test_random_and_wrong_drafts(path, truth, width):
    assert run(path, width=width, drafter=random_drafts(path)) == truth
    assert run(path, width=width, drafter=oracle(path, truth, Counter(), always_wrong=True)) == truth


@pytest.mark.parametrize("rollback", ["replay", "staged"])
def test_every_accept_length_under_the_planted_oracle(path, truth, rollback):
    seen = Counter()
    width = 4
    for _ in range(3):
        outcome = run(path, width=width, drafter=oracle(path, truth, seen), batched=True, linear_rollback=rollback)
        assert outcome == truth
    assert min(seen[length] for length in range(1, width + 1)) >= 20, seen
