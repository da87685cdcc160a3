"""Where an :class:`sgling.Engine`'s scheduler runs: a thread of this process, or processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.managers.channel import QueueChannel, TokenizerChannel
from sgling.srt.managers.scheduler_job import SchedulerFactory, SchedulerJob, serve_scheduler

_STOP_GRACE_S = 15.0


class SchedulerHost(Protocol):
    """Runs one engine's scheduler."""

    def tokenizer_side(self) -> TokenizerChannel:
        """Link for the tokenizer manager."""

    def start(self, on_death: Callable[[str], None]) -> None:
        """Start; ``on_death`` is called from another thread when a process ends unexpectedly."""

    def expect_end(self) -> None:
        """The scheduler is about to be told to stop: its end is no death."""

    def stop(self) -> None:
        """Wait for the end; a :class:`ShutdownReq` has been sent."""


class ThreadHost:
    """The scheduler in a thread; it announces its own death (:class:`SchedulerDied`)."""

    def __init__(self, job: SchedulerJob, factory: SchedulerFactory):
        self._channel = QueueChannel()
        args = (job, self._channel, ParallelState.single(), factory)
        self._thread = threading.Thread(target=serve_scheduler, args=args, name="sgling-scheduler", daemon=True)

    def tokenizer_side(self) -> TokenizerChannel:
        """See :class:`SchedulerHost`."""
        return self._channel.tokenizer_side()

    def start(self, on_death: Callable[[str], None]) -> None:
        """See :class:`SchedulerHost`."""
        self._thread.start()

    def expect_end(self) -> None:
        """See :class:`SchedulerHost`."""

    def stop(self) -> None:
        """See :class:`SchedulerHost`."""
        if self._thread.ident is not None:
            self._thread.join(_STOP_GRACE_S)


class ProcessHost:
    """One process per rank."""

    def __init__(self, job: SchedulerJob, factory: SchedulerFactory):
        from sgling.srt.managers.scheduler_process import SchedulerProcesses

        self._processes = SchedulerProcesses(job, factory)
        self._stopping = False

    def tokenizer_side(self) -> TokenizerChannel:
        """See :class:`SchedulerHost`."""
        from sgling.srt.managers.zmq_channel import ZmqTokenizerChannel

        return ZmqTokenizerChannel(self._processes.addresses)

    def start(self, on_death: Callable[[str], None]) -> None:
        """See :class:`SchedulerHost`."""
        self._processes.start()

        def watch() -> None:
            self._processes.wait_for_end()
            if not self._stopping:
                on_death(self._processes.describe_end())

        threading.Thread(target=watch, name="sgling-scheduler-watch", daemon=True).start()

    def expect_end(self) -> None:
        """See :class:`SchedulerHost`."""
        self._stopping = True

    def stop(self) -> None:
        """See :class:`SchedulerHost`."""
        self._processes.stop(_STOP_GRACE_S)
