"""Rotary position embedding in both pair layouts: interleaved (the MLA rope dimensions) and half-split."""

from sgling_kernel.rotary.reference import apply_rope, apply_rope_neox, rope_table

__all__ = ["apply_rope", "apply_rope_neox", "rope_table"]
