"""Measure where the weights of a small-M product wait best: in registers or in shared memory.

    python scripts/tune_linear.py                # table on the screen
    python scripts/tune_linear.py --write        # and into sgling_kernel/linear/measured.json, read at the first call

Weights are cold: captured chains of equal products rotate over eight or more copies and 300 MB or more. How K is cut
and every order of a sum are numerics and are not tuned. Only products with a choice are measured: K = 2,560 (parked)
and K = 5,120 (streamed).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import get_args

import torch

from sgling_kernel.linear import cuda
from sgling_kernel.linear.table import MARGIN, MEASURED, ROW_STEPS, Form
from sgling_kernel.timing import graph_us

# outputs and width of one of four ranks, and the form beside "held"
SHAPES: tuple[tuple[int, int, Form], ...] = (
    (5128, 2560, "parked"), (2120, 2560, "parked"), (3072, 2560, "parked"), (512, 2560, "parked"),
    (10240, 2560, "parked"), (2560, 5120, "streamed"),
)  # fmt: skip
COLD_BYTES, MIN_COPIES, CALLS, GROUPS = 300e6, 8, 96, 9


def chain_us(call: Callable[[torch.Tensor], torch.Tensor], weights: list[torch.Tensor]) -> float:
    """Median microseconds of one product in a captured chain."""

    def run() -> None:
        for i in range(CALLS):
            call(weights[i % len(weights)])

    return graph_us(run, 1, GROUPS) / CALLS


def product(rows: int, width: int, form: Form) -> Callable[[torch.Tensor], torch.Tensor]:
    """One form of a product as a function of the weight."""
    x = torch.randn(rows, width, device="cuda").bfloat16()
    return lambda w: cuda.small_m_linear(x, w, torch.bfloat16, form)


def measure(outputs: int, width: int, other: Form) -> list[dict]:
    """Lines of the table for one weight shape."""
    copies = max(MIN_COPIES, int(-(-COLD_BYTES // (2 * outputs * width))))
    weights = [torch.randn(outputs, width, device="cuda").bfloat16() for _ in range(copies)]
    lines = []
    for rows in ROW_STEPS:
        times = {f"{form}_us": round(chain_us(product(rows, width, form), weights), 2) for form in ("held", other)}
        shape = {"gpu": torch.cuda.get_device_name(), "outputs": outputs, "width": width, "rows": rows}
        lines.append({**shape, **times, "date": time.strftime("%Y-%m-%d")})
        print(json.dumps(lines[-1]), flush=True)
    return lines


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace this GPU's lines of the package's table")
    write = parser.parse_args().write
    found = [line for shape in SHAPES for line in measure(*shape)]
    forms = get_args(Form)[1:]
    better = sum(min(line.get(f"{form}_us", 1e9) for form in forms) < (1 - MARGIN) * line["held_us"] for line in found)
    print(f"another form wins {better} of {len(found)} by more than {MARGIN:.0%}")
    if write:
        kept = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
        kept = [line for line in kept if line["gpu"] != torch.cuda.get_device_name()]
        lines = ",\n".join(f"    {json.dumps(line)}" for line in [*kept, *found])
        MEASURED.write_text(f'{{\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
