"""Scheduler processes: one per tensor-parallel rank, spawned, watched, and never outliving their parent.

A scheduler that fails says so (:class:`SchedulerDied`) and exits with status 1. Signals of a terminal or a service
manager reach the whole group: a scheduler ignores SIGINT, and SIGTERM while its parent is draining.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait as wait_for_sentinels
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, NamedTuple

from sgling.srt.config.server_args import ServerArgs
from sgling.srt.managers.io_struct import SchedulerDied
from sgling.srt.managers.scheduler_job import SchedulerFactory, SchedulerJob, create_scheduler, serve_scheduler
from sgling.srt.managers.zmq_channel import ChannelAddresses, ZmqSchedulerChannel

if TYPE_CHECKING:
    from sgling.srt.distributed.parallel_state import ParallelState

logger = logging.getLogger(__name__)

_SIGTERM_CHECKS, _SIGTERM_CHECK_S = 10, 0.1  # how long a scheduler waits to see whether its parent drains
_SPAWN = multiprocessing.get_context("spawn")


class _Rank(NamedTuple):
    """What differs between the processes of one server, and what they share with the parent."""

    rank: int
    addresses: ChannelAddresses
    init_method: str
    draining: Event


def run_scheduler_process(job: SchedulerJob, place: _Rank, factory: SchedulerFactory) -> None:
    """Main function of a scheduler process; exits with status 1 on failure."""
    args = job.server_args
    logging.basicConfig(
        level=args.log_level.upper(), format=f"[%(asctime)s TP{place.rank}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    _die_with_parent(place.addresses)
    _install_signal_rules(place.draining)
    channel = ZmqSchedulerChannel(place.addresses) if place.rank == 0 else None
    ended_well = False
    try:
        parallel = _join_group(args, place)
        ended_well = serve_scheduler(job, channel, parallel, factory)
    except Exception as error:
        logger.exception("Scheduler of rank %d could not join its group", place.rank)
        if channel is not None:
            channel.send(SchedulerDied(f"{type(error).__name__}: {error}"))
    finally:
        if channel is not None:
            channel.close()
    # A failed rank leaves its peers inside a collective: leaving the group in order would wait for them.
    os._exit(0 if ended_well else 1)


def _join_group(args: ServerArgs, place: _Rank) -> ParallelState:
    from sgling.srt.distributed.parallel_state import init_parallel

    if args.device == "cuda":
        import torch

        torch.cuda.set_device(place.rank)
    return init_parallel(place.rank, args.tp_size, place.init_method, "nccl" if args.device == "cuda" else "gloo")


def _die_with_parent(addresses: ChannelAddresses) -> None:
    """End this process as soon as its parent is gone, whatever it is doing; nobody else removes the sockets then."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        wait_for_sentinels([parent.sentinel])
        addresses.remove()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _install_signal_rules(draining: Event) -> None:
    """Ignore SIGINT; on SIGTERM end, unless the parent was told to drain at the same time."""

    def decide() -> None:
        for _ in range(_SIGTERM_CHECKS):
            if draining.is_set():
                return
            time.sleep(_SIGTERM_CHECK_S)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=decide, daemon=True).start())


def free_port() -> int:
    """A TCP port of localhost that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class SchedulerProcesses:
    """All scheduler processes of one server, seen from their parent."""

    def __init__(self, job: SchedulerJob, factory: SchedulerFactory = create_scheduler):
        self.addresses = ChannelAddresses.create()
        self._draining = _SPAWN.Event()
        init_method = f"tcp://127.0.0.1:{free_port()}"
        self.processes = [
            _SPAWN.Process(
                target=run_scheduler_process,
                args=(job, _Rank(rank, self.addresses, init_method, self._draining), factory),
                name=f"sgling-scheduler-tp{rank}",
                daemon=True,
            )
            for rank in range(job.server_args.tp_size)
        ]

    def start(self) -> None:
        """Start every process."""
        for process in self.processes:
            process.start()

    def wait_for_end(self) -> None:
        """Block until one process has ended."""
        wait_for_sentinels([process.sentinel for process in self.processes])

    def describe_end(self) -> str:
        """What happened to the process that ended first, for logs and clients."""
        gone = set(wait_for_sentinels([process.sentinel for process in self.processes], timeout=0))
        ended = [process for process in self.processes if process.sentinel in gone]
        for process in ended:  # its sentinel closes a moment before its exit status can be read
            process.join(1.0)
        return "; ".join(f"{process.name} ended with exit code {process.exitcode}" for process in ended)

    def note_draining(self) -> None:
        """Tell the schedulers that a SIGTERM is being handled by their parent."""
        self._draining.set()

    def stop(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for orderly ends, kill what is left, remove the sockets."""
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    process.kill()
                process.join()
        self.addresses.remove()
