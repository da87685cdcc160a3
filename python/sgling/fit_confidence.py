"""``sgling fit-confidence``: answer prompts with every draft verified, fit calibration temperatures, write them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sgling.srt.config.fit_args import FitArgs
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.managers.channel import QueueChannel
from sgling.srt.managers.io_struct import TokenizedGenerateReqInput
from sgling.srt.managers.scheduler import Scheduler
from sgling.srt.managers.scheduler_job import SchedulerJob, make_job
from sgling.srt.managers.text_codec import TextCodec, load_tokenizer
from sgling.srt.model_loader.errors import ModelLoadError
from sgling.srt.sampling.sampling_params import SamplingParams
from sgling.srt.speculative.sts import StsFit, fit_temperatures


def read_prompts(path: str, codec: TextCodec | None) -> list[list[int]]:
    """Token ids of every line; raises ServerArgsError naming the line that cannot be read."""
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            ids = entry.get("input_ids")
            if ids is None and codec is None:
                raise ServerArgsError(f"--prompts {path}, line {number}: text needs a model with a tokenizer")
            prompts.append(codec.encode(entry["prompt"]) if ids is None else list(ids))
        except KeyError as error:
            raise ServerArgsError(f"--prompts {path}, line {number}: needs prompt or input_ids") from error
        except (ValueError, TypeError) as error:
            raise ServerArgsError(f"--prompts {path}, line {number}: {error!r}") from error
    return prompts


def unscheduled_job(args: FitArgs) -> SchedulerJob:
    """The server's job with confidences on, temperatures 1 and every draft verified, whatever the flags say."""
    job = make_job(args)
    if not job.server_args.spec.drafter.confidence:
        raise ServerArgsError("fit-confidence: the drafter has no confidence head")
    options = dataclasses.replace(
        job.server_args.spec.dspark,
        scheduled=True,
        verify_mode="static",
        temperatures=(1.0,) * job.server_args.spec.dspark.drafts,
    )
    spec = dataclasses.replace(job.server_args.spec, dspark=options, depth="fixed")
    return job._replace(server_args=dataclasses.replace(job.server_args, spec=spec))


@torch.inference_mode()
def collect(scheduler: Scheduler) -> tuple[np.ndarray, np.ndarray]:
    """Run the queued requests to their end: (raw logits [N, gamma], accepted drafts [N]) of every round."""
    logits, accepted = [], []
    scheduler.receive()
    while (launched := scheduler.launch_next(in_flight=False)) is not None:
        output = launched.result.wait()
        if output.schedule is not None:
            logits.append(output.schedule.confidence.numpy())
            accepted.append(output.accept_lens.numpy() - 1)
        scheduler.process(launched)
    return np.concatenate(logits), np.concatenate(accepted)


def fit(args: FitArgs) -> StsFit:
    """Answer the prompts and fit; raises ServerArgsError or ModelLoadError."""
    job = unscheduled_job(args)
    codec = None if job.tokenizer_dir is None else TextCodec(load_tokenizer(job.tokenizer_dir))
    channel = QueueChannel()
    scheduler = Scheduler(job.server_args, job.model_config, channel, ParallelState.single())
    for number, ids in enumerate(read_prompts(args.prompts, codec)):
        params = SamplingParams(temperature=args.temperature, max_new_tokens=args.max_new_tokens, sampling_seed=number)
        params.normalize(None)
        channel.tokenizer_side().send(TokenizedGenerateReqInput(str(number), ids, params))
    return fit_temperatures(*collect(scheduler))


def main(argv: Sequence[str]) -> int:
    """Command-line entry; returns the exit status."""
    try:
        args = FitArgs.from_argv(argv)
        result = fit(args)
    except (ServerArgsError, ModelLoadError, OSError, ValueError) as error:
        print(f"sgling fit-confidence: error: {error}", file=sys.stderr)
        return 1
    result.write(Path(args.output), args.prompts)
    for k, (temperature, before, after) in enumerate(
        zip(result.temperatures, result.ece_before, result.ece_after, strict=True), 1
    ):
        print(f"draft {k}: temperature {temperature:.3f}, calibration error {before:.4f} -> {after:.4f}")
    print(f"{result.num_samples} rounds; wrote {args.output}")
    return 0
