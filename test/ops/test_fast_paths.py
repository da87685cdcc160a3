"""A refused fast path is said once and remembered; an accepted one leaves no trace."""

from __future__ import annotations

import logging

import pytest
import torch

from sgling_kernel import dispatch
from sgling_kernel.moe import moe_experts


@pytest.fixture(autouse=True)
def nothing_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "_refused", {})


def test_the_first_refusal_is_logged_and_kept(caplog):
    with caplog.at_level(logging.WARNING):
        assert dispatch.usable("a", None)
        assert not dispatch.usable("b", "odd shape")
        assert not dispatch.usable("b", "another shape")
    assert dispatch.refused_fast_paths() == {"b": "odd shape"}
    assert [record.getMessage() for record in caplog.records] == ["Fast path b is not used: odd shape"]


def test_an_operator_reports_what_it_could_not_use():
    rows, experts, dim, inner = 40, 4, 10, 6  # rows of 10 and 6 floats are no multiple of 16 bytes
    x, ids = torch.randn(rows, dim), torch.randint(0, experts, (rows, 2))
    w13, w2 = torch.randn(experts, 2 * inner, dim), torch.randn(experts, dim, inner)
    moe_experts(x, w13, w2, torch.rand(rows, 2), ids, None)
    assert "10 values" in dispatch.refused_fast_paths()["moe.grouped"]
