"""Matrix products with a row-major weight [O, K]: model-dtype and fp32 output, and the fixed-row test mode."""

from sgling_kernel.linear.fixed_rows import fixed_row_count, fixed_rows, set_fixed_rows
from sgling_kernel.linear.reference import linear, linear_fp32

__all__ = ["fixed_row_count", "fixed_rows", "linear", "linear_fp32", "set_fixed_rows"]
