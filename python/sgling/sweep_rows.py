"""``sgling sweep rows``: what a DSPARK round costs on this machine, by the rows it verifies.

The rounds are the server's own scheduled ones, on empty contexts. Attention to long contexts and the host's share are
not in the numbers, and neither is what a batch of another size costs at the same rows: where batch sizes overlap, the
slower one counts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sgling.srt.config.depth_table import DepthTable
from sgling.srt.config.dspark_tables import SpsTable
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.row_sweep_args import RowSweepArgs
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.managers.scheduler_job import make_job
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.model_loader.errors import ModelLoadError
from sgling.srt.speculative.budget_registry import measure_scheduled_costs
from sgling.srt.speculative.registry import create_worker


def rates(table: DepthTable) -> SpsTable:
    """Steps per second by verify rows, never rising with rows, from milliseconds by (batch, rows per request)."""
    slowest: dict[int, float] = {}
    for batch, row in table.step_ms.items():
        for width, ms in enumerate(row, 1):
            slowest[batch * width] = max(ms, slowest.get(batch * width, 0.0))
    rows, cost = sorted(slowest), 0.0
    per_second = []
    for count in rows:
        cost = max(cost, slowest[count])
        per_second.append(1000.0 / cost)
    return SpsTable(tuple(rows), tuple(per_second))


def measure(args: RowSweepArgs) -> SpsTable:
    """Build the server's runner and worker and time scheduled rounds; raises ServerArgsError or ModelLoadError."""
    job = make_job(args)
    options = job.server_args.spec.dspark
    if not options.drafter.confidence:
        raise ServerArgsError("sweep rows: the drafter has no confidence head")
    options = dataclasses.replace(options, scheduled=True, verify_mode="compact")
    spec = dataclasses.replace(job.server_args.spec, dspark=options, depth="fixed")
    server_args = dataclasses.replace(job.server_args, spec=spec)
    runner = ModelRunner(server_args, job.model_config, ParallelState.single())
    return rates(measure_scheduled_costs(runner, create_worker(spec, runner)))


def main(argv: Sequence[str]) -> int:
    """Command-line entry; returns the exit status."""
    try:
        args = RowSweepArgs.from_argv(argv)
        table = measure(args)
        data = {"sample_batch_tokens": table.rows, "sample_steps_per_sec": table.steps_per_sec}
        Path(args.output).write_text(json.dumps(data, indent=1), encoding="utf-8")
    except (ServerArgsError, ModelLoadError, OSError, ValueError) as error:
        print(f"sgling sweep rows: error: {error}", file=sys.stderr)
        return 1
    for rows, rate in zip(table.rows, table.steps_per_sec, strict=True):
        print(f"{rows:5d} rows: {1000 / rate:8.3f} ms")
    print(f"wrote {args.output}")
    return 0
