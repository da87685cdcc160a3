"""Rotary embedding: interleaved pairs, fp32 table, one rounding."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sgling_kernel.rotary import apply_rope, reference, rope_table

THETA = 6e6


def _complex_oracle(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Multiply each pair, read as a complex number, by e^(i * position * theta^(-2i/dim)), all in fp64."""
    dim = x.shape[-1]
    frequency = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = positions.double()[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle).view(x.shape[0], *(1,) * (x.dim() - 2), dim // 2)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2)


@pytest.mark.parametrize("shape", [(5, 32), (5, 4, 64), (5, 2, 3, 8)])
def test_rope_rotates_interleaved_pairs_like_complex_multiplication(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 7, 100, 1000])
    out = apply_rope(x, positions, rope_table(1001, shape[-1], THETA))
    torch.testing.assert_close(out.double(), _complex_oracle(x, positions), atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 8), (1, 32), (5, 32), (65, 64)])
def test_rope_on_a_cpu_gives_the_bits_of_the_reference_for_slices_of_any_alignment(heads, dim, dtype):
    wide = torch.randn(9, heads * dim + 3, generator=torch.Generator().manual_seed(4)).to(dtype)
    positions, table = torch.arange(9) * 911, rope_table(8000, dim, THETA)
    for start in (0, 1, 3):
        x = wide[:, start : start + heads * dim].unflatten(-1, (heads, dim))
        want = reference.apply_rope(x, positions, table)
        assert torch.equal(apply_rope(x, positions, table), want)
        assert torch.equal(apply_rope(x[4:5].clone(), positions[4:5], table), want[4:5])


def test_rope_at_position_zero_is_the_identity():
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(apply_rope(x, torch.zeros(3, dtype=torch.int64), rope_table(1, 32, THETA)), x)


def test_rope_score_depends_on_the_distance_only():
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 1, 32, generator=generator)
    table = rope_table(64, 32, THETA)

    def score(query_position: int, key_position: int) -> torch.Tensor:
        rotated_q = apply_rope(q, torch.tensor([query_position]), table)
        return (rotated_q * apply_rope(k, torch.tensor([key_position]), table)).sum()

    torch.testing.assert_close(score(9, 4), score(55, 50), atol=1e-4, rtol=0)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_rope_in_bf16_multiplies_in_fp32_and_rounds_once():
    x = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    positions, table = torch.arange(6) * 37, rope_table(256, 32, THETA)
    out = apply_rope(x, positions, table)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rope(x.float(), positions, table).bfloat16())


def test_rope_table_is_fp32_cos_sin_per_position_and_pair():
    table = rope_table(10, 8, 100.0)
    assert table.shape == (10, 4, 2) and table.dtype == torch.float32
    angle = torch.tensor(7 * 100.0 ** (-2 / 8))
    torch.testing.assert_close(table[7, 1], torch.stack((angle.cos(), angle.sin())))


@pytest.mark.parametrize("dim", [0, 7, -2])
def test_rope_table_refuses_a_dimension_that_has_no_pairs(dim):
    with pytest.raises(ValueError, match="rope dim"):
        rope_table(4, dim, THETA)


def test_rope_reads_no_device_value_on_the_host():
    with FakeTensorMode():
        out = apply_rope(torch.zeros(6, 4, 32), torch.zeros(6, dtype=torch.int64), rope_table(64, 32, THETA))
    assert out.shape == (6, 4, 32)
