"""Rotary position embedding in both pair layouts: interleaved (the MLA rope dimensions) and half-split."""

from torch import Tensor

from sgling_kernel.rotary import cpu, reference
from sgling_kernel.rotary.reference import apply_rope_neox, rope_table

__all__ = ["apply_rope", "apply_rope_neox", "rope_table"]


def apply_rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate interleaved pairs by their row's position; see reference.apply_rope."""
    rotate = cpu.apply_rope if cpu.why_not_complex(x) is None else reference.apply_rope
    return rotate(x, positions, table)
