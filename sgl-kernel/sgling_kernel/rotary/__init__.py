"""Rotary position embedding of the MLA rope dimensions (interleaved pairs)."""

from sgling_kernel.rotary.reference import apply_rope, rope_table

__all__ = ["apply_rope", "rope_table"]
