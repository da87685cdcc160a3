"""Where the weights of a product wait: "held" in registers, partly "parked" in shared memory, or "streamed".

With weights parked three CTAs fit on a multiprocessor instead of two; streamed, one CTA per multiprocessor has all its
rows in shared memory. No bit changes. ``measured.json`` holds times of the forms that a weight shape has, per GPU and
row count (scripts/tune_linear.py writes it).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch

Form = Literal["held", "parked", "streamed"]

MEASURED = Path(__file__).with_name("measured.json")
MARGIN = 0.02  # another form must be faster than "held" by this share to be chosen
ROW_STEPS = (1, 6, 9, 17)  # row counts that are measured: up to 8, 16 and 24 rows are one, two and three tiles


def measured_rows(count: int) -> int:
    """The measured row count whose time stands for ``count`` rows: the largest that is not above it."""
    return max(step for step in ROW_STEPS if step <= count)


@cache
def fastest_form(gpu: str, outputs: int, width: int, rows: int) -> Form:
    """The form that won for that weight shape and measured row count; "held" where nothing was measured."""
    for line in json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]:
        if (line["gpu"], line["outputs"], line["width"], line["rows"]) == (gpu, outputs, width, rows):
            times = {form: line[f"{form}_us"] for form in get_args(Form) if f"{form}_us" in line}
            best = min(times, key=times.get)
            return best if times[best] < (1 - MARGIN) * times["held"] else "held"
    return "held"


@cache
def gpu_name(index: int | None) -> str:
    """Name of a GPU as the table has it; "cpu" for None (emulation)."""
    return "cpu" if index is None else torch.cuda.get_device_name(index)
