"""Every operator of a decode or verify step with the shapes of one of four ranks: the table of the GPU op tests.

Importing this module fills it; the cases stand in ``model_op_cases.py`` and ``step_op_cases.py``.
"""

from __future__ import annotations

from gpu import model_op_cases, step_op_cases
from gpu.op_case import CASES, Case, build

__all__ = ["CASES", "Case", "build", "model_op_cases", "step_op_cases"]
