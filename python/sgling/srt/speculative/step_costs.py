"""Measures at start what a step costs at every width and batch size, for ``--speculative-depth auto``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch

from sgling.srt.config.depth_table import DepthTable, never_cheaper
from sgling.srt.core.step import StepInput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PlainWorker, StepWorker
from sgling_kernel.sampling import SamplingFlags

BATCH_SIZES = (1, 4, 16, 48)
KV_BOUND = 256
_REPEATS = 3  # rounds over all widths; the fastest counts, since other load only ever adds time
_STEPS = {"cpu": 1, "cuda": 8}  # steps between two looks at the clock; on a GPU enough of them to hide the host


def measure_step_costs(runner: ModelRunner, worker: StepWorker, max_width: int) -> DepthTable:
    """Step times of this machine; every rank returns rank 0's. Call before the first request is admitted.

    The steps run on free request rows with empty contexts; these own no slots, so all they write goes to the dummies.
    Host time of the scheduler and the attention to a long context are not in these numbers.
    """
    sizes = [size for size in BATCH_SIZES if size <= runner.plan.max_running_requests]
    plain = PlainWorker(runner)
    with torch.inference_mode(), runner.on_forward_stream():  # in stream order with the steps that follow
        step_ms = {size: never_cheaper(_fastest(runner, worker, size, range(1, max_width + 1))) for size in sizes}
        plain_ms = {size: _fastest(runner, plain, size, (1,))[0] for size in sizes}
        _reset(runner)
    table = DepthTable("measured at start on empty contexts", step_ms, plain_ms)
    leads = runner.parallel.rank == 0
    shared = runner.parallel.broadcast_bytes(json.dumps(table.to_json()).encode() if leads else None)
    return DepthTable.from_json(json.loads(shared))


def _fastest(runner: ModelRunner, worker: StepWorker, batch: int, widths: Sequence[int]) -> list[float]:
    """Milliseconds of one step at every width; the widths take turns, so that a disturbance hits few samples of each.

    The first round only warms up.
    """
    rounds = [[_step_ms(runner, worker, batch, width) for width in widths] for _ in range(_REPEATS + 1)]
    return [min(samples) for samples in zip(*rounds[1:], strict=True)]


def _step_ms(runner: ModelRunner, worker: StepWorker, batch: int, width: int) -> float:
    _reset(runner)
    rows = torch.arange(1, batch + 1, device=runner.device)
    runner.future.output_tokens[1 : batch + 1] = rows * (runner.model_config.vocab_size // (batch + 2))
    step = StepInput(rows, width, min(KV_BOUND, runner.req_to_token.width), SamplingFlags(), None)
    count = _STEPS[runner.device]
    runner.threads.for_rows(batch * width)  # as the serving loop does
    begin = time.perf_counter()
    for _ in range(count):
        worker.decode(step)
    if runner.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1000 / count


def _reset(runner: ModelRunner) -> None:
    """Leave no trace: lengths and tokens of all rows, and the dummy state slot."""
    for buffer in (runner.future.new_seq_lens, runner.future.output_tokens, runner.future.topk_index):
        buffer.zero_()
    runner.pools.state.clear(0)
