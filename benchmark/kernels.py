"""Every decode operator alone on one GPU: microseconds, bandwidth, and what the alternatives need in the same run.

    python benchmark/kernels.py --output benchmark/results/h200/kernels.jsonl
    python benchmark/kernels.py --quick                     # M = 1 and 6, under a minute
    python benchmark/kernels.py --only kda mla --rows 1 9

A chain of equal calls is captured in a CUDA graph; the calls rotate over copies of the cold operand (8 or more, 300 MB
or more), so that weights come from memory. Times are the median of several replays over the calls. Measured in the same
run: the CUDA C++ form with and without programmatic dependent launch, the Triton form, and torch's libraries. Where an
operator has no CUDA C++ form the first two are its Triton form.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from kernel_cases import CASES, Operands

from sgling_kernel import cuda, dispatch
from sgling_kernel.timing import copy_gbps, graph_us

ROWS, QUICK_ROWS = (1, 6, 9, 17), (1, 6)
SWITCHES = {  # column of the result -> switches of this process
    "us": {},
    "us_without_pdl": {"pdl": False},
    "triton_us": {"cuda_kernels": False},
}


def chain_us(op: Callable, copies: list[tuple], calls: int, groups: int) -> float:
    """Median microseconds of one call in a captured chain of ``calls``."""

    def run() -> None:
        for call in range(calls):
            op(*copies[call % len(copies)])

    return graph_us(run, 1, groups) / calls


def measure(name: str, m: int, bandwidth: float, groups: int) -> dict:
    """One line of the table."""
    torch.manual_seed(0)
    operands: Operands = CASES[name](m)
    calls = max(len(operands.copies), 64)
    line = {"op": name, "m": m, "bytes": round(operands.bytes)}
    for column, switches in SWITCHES.items():
        dispatch.set_kernel_switches(**switches)
        line[column] = round(chain_us(operands.op, operands.copies, calls, groups), 2)
    dispatch.set_kernel_switches()
    line["library_us"] = None
    if operands.library is not None:
        few = min(calls, 32)  # some alternatives copy gigabytes
        line["library_us"] = round(chain_us(operands.library, operands.copies, few, groups), 2)
    line["gbps"] = round(operands.bytes / line["us"] / 1e3)
    line["share_of_copy"] = round(line["gbps"] / bandwidth, 3)
    return line


def lines(names: list[str], rows: tuple[int, ...], groups: int) -> Iterator[dict]:
    """A header with the machine, then one line per operator and row count; an operator that fails is a line too."""
    bandwidth = copy_gbps()
    yield {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda_kernels": cuda.why_not() or "built",
        "copy_gbps": round(bandwidth),
        "date": time.strftime("%Y-%m-%d"),
    }
    for name in names:
        for m in rows:
            try:
                yield measure(name, m, bandwidth, groups)
            except (RuntimeError, ValueError, TypeError) as error:
                dispatch.set_kernel_switches()
                yield {"op": name, "m": m, "error": str(error).splitlines()[0]}
            torch.cuda.empty_cache()
    yield {"refused_fast_paths": dispatch.refused_fast_paths()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="operators whose name begins with one of these")
    parser.add_argument("--rows", nargs="*", type=int, help="row counts")
    parser.add_argument("--quick", action="store_true", help="few row counts, few repetitions")
    parser.add_argument("--output", type=Path, help="also write the lines to this file")
    args = parser.parse_args()
    names = [name for name in CASES if not args.only or name.startswith(tuple(args.only))]
    rows = tuple(args.rows) if args.rows else QUICK_ROWS if args.quick else ROWS
    if cuda.why_not() is None:
        cuda.prebuild()
    failed, text = False, ""
    with torch.inference_mode():
        for line in lines(names, rows, groups=3 if args.quick else 9):
            failed |= "error" in line
            print(json.dumps(line), flush=True)
            text += json.dumps(line) + "\n"
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
