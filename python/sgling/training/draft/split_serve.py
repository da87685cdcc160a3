"""SplitServe: N ranks train while M ranks run the target, in one job; features stream from rank to rank.

The parent process starts the ranks, watches them and keeps the store they talk through. A trainer asks for batch b
(key ``want/b``); the engine rank that owns it sends the tensors as soon as it has them. Nothing is sent unasked, so no
transfer is open when a run ends. Batch b belongs to engine b mod M and trainer b mod N; it is the very batch that the
one-process loop with ``--fresh`` would train on.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing as mp
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.train_draft_args import Split, TrainDraftArgs

from .engine_rank import run_engine
from .run import EXPORT_DIR
from .streams import END, Link, Stopped
from .trainer_rank import run_trainer

logger = logging.getLogger(__name__)
GRACE_S = 20.0
"""Time the other ranks have to save and leave after one has died."""
FAILED = "failed"


class Job(NamedTuple):
    """What every rank is told."""

    kind: str
    args: TrainDraftArgs
    split: Split
    device: str
    port: int


def role(rank: int, split: Split) -> str:
    """Name of a rank in messages."""
    return f"trainer rank {rank}" if rank < split.trainers else f"engine rank {rank - split.trainers}"


def run_rank(rank: int, job: Job) -> None:
    """A rank's process; exit status 0 after a finished run, 1 after a failure here or elsewhere."""
    logging.basicConfig(level=logging.INFO, format=f"[{role(rank, job.split)}] %(message)s", stream=sys.stderr)
    device = job.device
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    size = sum(job.split)
    backend = "nccl" if job.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size)
    trainers = dist.new_group(list(range(job.split.trainers)))
    link = Link(store, rank, job.split, device)
    try:
        if rank < job.split.trainers:
            run_trainer(job.kind, job.args, link, trainers)
        else:
            run_engine(job.kind, job.args, link)
    except Stopped as stopped:
        logger.warning("stopped: %s", stopped)
        sys.exit(1)


def check_devices(args: TrainDraftArgs, split: Split) -> str:
    """Device type; raises ServerArgsError for fewer GPUs than ranks, or a generator that cannot choose its GPU."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and torch.cuda.device_count() < sum(split):
        raise ServerArgsError(
            f"--split-serve {args.split_serve}: needs {sum(split)} GPUs, there are {torch.cuda.device_count()}"
        )
    if device == "cuda" and args.generator == "engine":
        raise ServerArgsError("--split-serve on GPUs: only with --generator batched")
    return device


def train_split(kind: str, args: TrainDraftArgs) -> Path:
    """Run the job; returns the folder of the exported drafter. Raises RuntimeError naming the rank that died."""
    split = args.split()
    args = dataclasses.replace(args, fresh=True)
    device = check_devices(args, split)
    Path(args.output).mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = Job(kind, args, split, device, store.port)
    context = mp.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, job), name=role(rank, split)) for rank in range(sum(split))]
    for process in ranks:
        process.start()
    pids = {process.name: process.pid for process in ranks}
    (Path(args.output) / "ranks.json").write_text(json.dumps(pids) + "\n", encoding="utf-8")
    try:
        supervise(ranks, split.trainers, store)
    finally:
        stop(ranks)
    return Path(args.output) / EXPORT_DIR


def supervise(ranks: list[mp.Process], trainers: int, store: dist.TCPStore) -> None:
    """Until all trainers are done, or somebody died: then everybody is told, and the first to die is named."""
    running = list(ranks)
    while any(process in running for process in ranks[:trainers]):
        wait([process.sentinel for process in running])
        for process in [process for process in running if not process.is_alive()]:
            running.remove(process)
            process.join()
            if process.exitcode != 0:
                store.set(END, f"{FAILED}: {process.name} died (exit status {process.exitcode})")
                stop(running, GRACE_S)
                raise RuntimeError(f"--split-serve: {process.name} died (exit status {process.exitcode})")
    store.set(END, "done")
    stop(running, GRACE_S)


def stop(processes: list[mp.Process], grace: float = 0.0) -> None:
    """Wait for processes to leave, then end those that did not."""
    until = time.monotonic() + grace
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
