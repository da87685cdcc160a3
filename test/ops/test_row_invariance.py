"""Row invariance of the CUDA C++ operators in the emulation: tiny shapes, every operator, every tile boundary."""

from __future__ import annotations

import pytest
import torch

from ops.row_cases import RowCase, Sizes, check_kda, check_mla, check_rows, row_cases
from sgling_kernel import dispatch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test/gpu runs the kernels themselves")

POOL, COUNTS = 20, (1, 2, 9, 17, 20)
SIZES = Sizes(((24, 320), (8, 2720)), ((16, 2), (16, 8)), 2, 256, 64, 32, 3000)
SERVES = {  # case -> fast paths that must have served it
    "linear": {"linear.cuda"},
    "gated": {"linear.gated"},
    "norms": {"norm.cuda"},
    "router": {"router.norm_product"},
    "top-k": {"router.cuda"},
    "experts": {"moe.cuda", "moe.finish"},
    "swiglu": {"moe.swiglu"},
    "embedding": set(),
    "latent": {"mla_prepare.cuda"},
    "arg-max": set(),
    "best": {"linear.cuda"},  # streamed at real sizes only; test_cuda_linear.py has that form
}


@pytest.fixture
def served(emulated_cuda, monkeypatch):
    """Names of the fast paths that accepted operands."""
    names, usable = set(), dispatch.usable

    def asked(path, reason):
        names.update([path] if reason is None else [])
        return usable(path, reason)

    monkeypatch.setattr(dispatch, "usable", asked)
    return names


@pytest.mark.parametrize("name", row_cases(SIZES, POOL))
def test_a_row_depends_on_itself_alone(name, served):
    check_rows(row_cases(SIZES, POOL)[name](), COUNTS, draws=2)
    assert SERVES[name.split()[0]] <= served


def test_verify_rows_are_decode_steps(served):
    check_kda(heads=1, dim=128, widths=(1, 3, 9))
    assert "kda.cuda" in served


def test_attention_rows_are_decode_steps(served):
    check_mla(heads=2, length=130, widths=(1, 5))
    assert "mla_decode.cuda" in served


def test_the_harness_notices_a_mean_over_the_batch():
    """A row that sees its neighbours in one bit of 2^-8 must be found."""

    def leaky(x):
        return (x + x[:1] * 2.0**-8 * (x.shape[0] > 5),)

    with pytest.raises(AssertionError, match="rows, draw"):
        check_rows(RowCase((torch.randn(POOL, 4),), leaky), COUNTS, draws=2)
