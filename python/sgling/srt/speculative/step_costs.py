"""Measures at start what a step costs at every width and batch size, for ``--speculative-depth auto``."""

from __future__ import annotations

import json
import time

import torch

from sgling.srt.config.depth_table import DepthTable
from sgling.srt.core.step import StepInput
from sgling.srt.model_executor.model_runner import ModelRunner
from sgling.srt.speculative.base import PlainWorker, StepWorker
from sgling_kernel.sampling import SamplingFlags

BATCH_SIZES = (1, 4, 16, 48)
KV_BOUND = 256
_WARM_UP, _REPEATS = 1, 2  # the best of _REPEATS blocks counts
_STEPS = {"cpu": 1, "cuda": 8}  # per block; on a GPU enough of them to hide the host


def measure_step_costs(runner: ModelRunner, worker: StepWorker, max_width: int) -> DepthTable:
    """Step times of this machine; every rank returns rank 0's. Call before the first request is admitted.

    The steps run on free request rows with empty contexts; these own no slots, so all they write goes to the dummies.
    Host time of the scheduler and the attention to a long context are not in these numbers.
    """
    rows = runner.plan.max_running_requests
    sizes = [size for size in BATCH_SIZES if size <= rows]
    plain = PlainWorker(runner)
    with torch.inference_mode():
        step_ms = {
            size: tuple(_step_ms(runner, worker, size, width) for width in range(1, max_width + 1)) for size in sizes
        }
        plain_ms = {size: _step_ms(runner, plain, size, 1) for size in sizes}
        _reset(runner)
    table = DepthTable("measured at start on empty contexts", step_ms, plain_ms)
    shared = runner.parallel.broadcast_bytes(json.dumps(table.to_json()).encode() if runner.parallel.rank == 0 else None)
    return DepthTable.from_json(json.loads(shared))


def _step_ms(runner: ModelRunner, worker: StepWorker, batch: int, width: int) -> float:
    _reset(runner)
    rows = torch.arange(1, batch + 1, device=runner.device)
    vocab = runner.model_config.vocab_size
    runner.future.output_tokens[1 : batch + 1] = rows * (vocab // (batch + 2))
    kv_bound = min(KV_BOUND, runner.req_to_token.width)
    step = StepInput(rows, width, kv_bound, SamplingFlags(), None)
    best, steps = float("inf"), _STEPS[runner.device]
    for repeat in range(_WARM_UP + _REPEATS):
        begin = time.perf_counter()
        for _ in range(steps):
            worker.decode(step)
        if runner.device == "cuda":
            torch.cuda.synchronize()
        if repeat >= _WARM_UP:
            best = min(best, time.perf_counter() - begin)
    return best * 1000 / steps


def _reset(runner: ModelRunner) -> None:
    """Leave no trace: lengths and tokens of all rows, and the dummy state slot."""
    for buffer in (runner.future.new_seq_lens, runner.future.output_tokens, runner.future.topk_index):
        buffer.zero_()
    runner.pools.state.clear(0)
