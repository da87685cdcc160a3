"""``launch_server``: starts the scheduler processes and the HTTP server, and sees them through to their end.

Order of a start: bind the port, start the schedulers, wait until they are ready, listen, warm up, be healthy.
Ways to end: SIGTERM drains and exits 0 (143 when ``--drain-timeout`` is over first, 1 when the engine is stuck);
SIGINT ends at once; a dead scheduler turns health red, fails the waiting requests, and takes the server down with
status 1 after a short grace (docs/serving.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from enum import Enum

import uvicorn
import uvloop

from sgling.srt.config.acceptance import read_acceptance, wants_smoke
from sgling.srt.config.draft_model import acceptance_dir
from sgling.srt.config.environ import force_shutdown, read_environ
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.entrypoints.app import AppParts, create_app
from sgling.srt.entrypoints.openai.context import load_template
from sgling.srt.managers.acceptance_smoke import run_smoke
from sgling.srt.managers.generate_req import GenerateReqInput, RequestError
from sgling.srt.managers.request_observer import MetricsObserver, RequestLog
from sgling.srt.managers.scheduler_job import SchedulerFactory, SchedulerJob, create_scheduler, make_job
from sgling.srt.managers.scheduler_process import SchedulerProcesses
from sgling.srt.managers.text_codec import load_tokenizer
from sgling.srt.managers.tokenizer_manager import TokenizerManager
from sgling.srt.managers.zmq_channel import ZmqTokenizerChannel
from sgling.srt.observability.metrics import ServerMetrics
from sgling.srt.parser.chat_template import ChatTemplateError

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5
DEAD_GRACE_S = 5.0  # how long a server with a dead scheduler goes on answering /health with 503
DRAIN_QUIET_S = 1.0  # a draining server ends when it has been idle this long
STOP_GRACE_S = 15.0  # for schedulers to end in order
ANSWER_GRACE_S = 2.0  # for the last answers to leave when the server does not drain


class Ending(Enum):
    """Why a server ends; the value is its exit status."""

    DRAINED = 0
    FAILED = 1
    INTERRUPTED = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM  # before it was ready, or forced


def launch_server(
    server_args: ServerArgs, factory: SchedulerFactory = create_scheduler, dead_grace_s: float = DEAD_GRACE_S
) -> None:
    """Serve until told to end; returns after a drain, otherwise raises SystemExit with a non-zero status.

    Raises ServerArgsError for arguments that cannot be served, before anything is started.
    """
    begin = time.monotonic()
    logging.basicConfig(
        level=server_args.log_level.upper(), format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    job = make_job(server_args)
    _check_template(job.server_args)
    server = Server(job.server_args, job, factory, dead_grace_s)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ending = runner.run(server.run(begin))
    if ending is not Ending.DRAINED:
        sys.exit(ending.value)


def _check_template(args: ServerArgs) -> None:
    """A template given by flag must compile, before anything is started."""
    try:
        if args.chat_template is not None:
            load_template(args)
    except ChatTemplateError as error:
        raise ServerArgsError(str(error)) from error


class _Uvicorn(uvicorn.Server):
    """Signals are the launcher's business."""

    @contextlib.contextmanager
    def capture_signals(self):
        """Leave the handlers alone."""
        yield


class Server:
    """One running server."""

    def __init__(self, args: ServerArgs, job: SchedulerJob, factory: SchedulerFactory, dead_grace_s: float):
        self._args = args
        self._job = job
        self._dead_grace_s = dead_grace_s
        self._socket = bind_socket(args.host, args.port)
        self._processes = SchedulerProcesses(job, factory)
        self._manager: TokenizerManager | None = None
        self._http: _Uvicorn | None = None
        self._http_task: asyncio.Task | None = None
        self._ordered = asyncio.Event()  # a signal has come
        self._order: Ending | None = None
        self._scheduler_ended = asyncio.Event()

    async def run(self, begin: float) -> Ending:
        """The whole life. ``begin``: start of the program, seconds of ``time.monotonic``."""
        self._watch_signals()
        self._processes.start()
        self._watch_processes()
        ending = Ending.FAILED
        try:
            if await self._unless_ended(self._start(begin)):
                await self._wait_for_end()
            ending = await self._end()
        except ServerArgsError as error:  # found while starting: a damaged file
            logger.error("%s", error)
        except RequestError as error:
            logger.error("The warm-up failed: %s", error.message)
        except Exception:
            if self._manager is None or self._manager.died is None:  # a scheduler has logged its own failure
                logger.exception("The server failed")
        finally:
            await self._shut_down(STOP_GRACE_S if ending is Ending.DRAINED else ANSWER_GRACE_S)
        return ending

    # ---- start ----

    async def _start(self, begin: float) -> None:
        """Up to the point where the server is healthy."""
        self._manager, metrics = await self._build_manager()
        await self._manager.start()
        parts = AppParts(self._manager, self._job, metrics, time.monotonic() - begin)
        level = self._args.log_level_http or self._args.log_level
        config = uvicorn.Config(
            create_app(parts), loop="none", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S, log_level=level
        )
        self._http = _Uvicorn(config)
        self._http_task = asyncio.create_task(self._http.serve([self._socket]))
        while not self._http.started:
            if self._http_task.done():
                await self._http_task
                raise RuntimeError("the HTTP server did not start")
            await asyncio.sleep(0.01)
        host, port = self._socket.getsockname()[:2]
        logger.info("Listening on http://%s:%d", host, port)
        if not self._args.skip_server_warmup:
            await self._warm_up()
        self._manager.ready = True
        logger.info("The server is fired up and ready to roll!")

    async def _build_manager(self) -> tuple[TokenizerManager, ServerMetrics | None]:
        """The manager with its tokenizer, loaded while the schedulers load the weights."""
        tokenizer = None
        if self._job.tokenizer_dir is not None:
            tokenizer = await asyncio.to_thread(load_tokenizer, self._job.tokenizer_dir)
        metrics, observers = None, []
        if self._args.enable_metrics:
            name = self._args.served_model_name
            metrics = ServerMetrics({"model_name": name, "engine_type": "unified", "tp_rank": "0"})
            observers.append(MetricsObserver(metrics))
        if self._args.log_requests:
            observers.append(RequestLog(self._args.log_requests_level))
        channel = ZmqTokenizerChannel(self._processes.addresses)
        return TokenizerManager(self._args, self._job.model_config, channel, tokenizer, observers), metrics

    async def _warm_up(self) -> None:
        """One short request, so that the first client does not pay for first-use costs; a failure ends the server.
        Then the acceptance smoke, where there is a floor.

        Its traces in caches and statistics are flushed.
        """
        body = self._manager.preparer.warm_up_body("The capital of France is", max_new_tokens=8)
        await self._manager.generate_once(GenerateReqInput.from_json(body))
        acceptance = read_acceptance(acceptance_dir(self._args, self._job.model_dir))
        if wants_smoke(self._args, acceptance):
            self._manager.acceptance_smoke = await run_smoke(self._manager, acceptance)
        await self._manager.flush_cache(timeout_s=5.0)

    async def _unless_ended(self, work) -> bool:
        """Run ``work``; False when a signal or a dead scheduler came first. Failures of ``work`` are raised."""
        task = asyncio.create_task(work)
        events = [asyncio.create_task(event.wait()) for event in (self._ordered, self._scheduler_ended)]
        await asyncio.wait([task, *events], return_when=asyncio.FIRST_COMPLETED)
        finished = task.done()
        for pending in (task, *events):
            pending.cancel()
        results = await asyncio.gather(task, *events, return_exceptions=True)
        if finished and isinstance(results[0], RequestError | RuntimeError) and self._scheduler_ended.is_set():
            return False  # the dead scheduler is the cause, and is reported as such
        if finished and isinstance(results[0], Exception):
            raise results[0]
        return finished

    # ---- watch ----

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, Ending.DRAINED)
        loop.add_signal_handler(signal.SIGINT, self._on_signal, Ending.INTERRUPTED)

    def _on_signal(self, order: Ending) -> None:
        """Note the order; SIGINT overrides a drain that is under way, a second SIGTERM does not hurry it."""
        if order is self._order:
            return
        if order is Ending.DRAINED:
            self._processes.note_draining()
            if self._manager is None or not self._manager.ready or force_shutdown() or not self._manager.is_healthy:
                order = Ending.TERMINATED
        if self._manager is not None:
            self._manager.ready = False  # /health and /ready turn 503 with this very signal
        if self._order in (None, Ending.DRAINED):
            self._order = order
        self._ordered.set()

    def _watch_processes(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._processes.processes:
            loop.add_reader(process.sentinel, self._on_process_end, process.sentinel)

    def _on_process_end(self, sentinel: int) -> None:
        """A scheduler process is gone: fail what waits for it, unless the server is ending anyway."""
        asyncio.get_running_loop().remove_reader(sentinel)
        if self._manager is not None:
            self._manager.scheduler_died(self._processes.describe_end())
        self._scheduler_ended.set()

    async def _wait_for_end(self) -> None:
        """Return when there is a reason to end."""
        await self._unless_ended(self._http_task_end())

    async def _http_task_end(self) -> None:
        await asyncio.shield(self._http_task)
        raise RuntimeError("the HTTP server ended by itself")

    # ---- end ----

    async def _end(self) -> Ending:
        """Do what the reason to end asks for; returns the exit status."""
        if self._order is None or self._scheduler_ended.is_set():
            return await self._end_dead()
        if self._order is Ending.DRAINED:
            return await self._end_drained()
        return self._order

    async def _end_drained(self) -> Ending:
        """Wait until every request has ended, a signal or the time limit says otherwise, or the engine is stuck."""
        limit_s = self._args.drain_timeout
        logger.info("SIGTERM: draining%s", "" if limit_s is None else f" for at most {limit_s:g} s")
        deadline = None if limit_s is None else time.monotonic() + limit_s
        drain, stuck = asyncio.create_task(self._drain()), asyncio.create_task(self._engine_is_stuck())
        ending = None
        while ending is None:
            await asyncio.wait([drain, stuck], timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            if self._order is not Ending.DRAINED:
                ending = self._order
            elif self._manager.died is not None or stuck.done():
                ending = Ending.FAILED
            elif drain.done():
                ending = Ending.DRAINED
            elif deadline is not None and time.monotonic() >= deadline:
                left = self._manager.num_live
                ending = Ending.TERMINATED if left else Ending.DRAINED
                if left:
                    logger.warning("--drain-timeout is over: %d requests are aborted", left)
        drain.cancel()
        stuck.cancel()
        return ending

    async def _engine_is_stuck(self) -> None:
        """Return when the engine has given no sign of life for the time a health probe waits."""
        timeout_s = read_environ().health_check_timeout
        while await self._manager.health_check(timeout_s):
            await asyncio.sleep(timeout_s)
        if self._manager.died is None:
            logger.error("The engine gave no sign of life for %g s; what it was running is lost", timeout_s)

    async def _end_dead(self) -> Ending:
        """Stay for a moment, so that clients and probes see why."""
        if self._http is not None:
            logger.error("A scheduler has died; the server ends in %.1f s", self._dead_grace_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ordered.wait(), self._dead_grace_s)
        else:
            logger.error("A scheduler died during start-up: %s", self._processes.describe_end())
        return Ending.FAILED

    async def _drain(self) -> None:
        """Return when no request has been under way for a moment."""
        while True:
            await self._manager.drain()
            await asyncio.sleep(DRAIN_QUIET_S)
            if self._manager.num_live == 0 or self._manager.died is not None:
                return

    async def _shut_down(self, grace_s: float) -> None:
        """Close the HTTP server, then the schedulers."""
        loop = asyncio.get_running_loop()
        for process in self._processes.processes:
            loop.remove_reader(process.sentinel)
        if self._manager is not None:
            self._manager.abort_request(abort_all=True)
        if self._http_task is not None:
            self._http.should_exit = True
            done, _ = await asyncio.wait([self._http_task], timeout=grace_s)
            if not done:
                self._http.force_exit = True
                self._http_task.cancel()
            await asyncio.gather(self._http_task, return_exceptions=True)
        if self._manager is not None:
            await self._manager.close()
        await asyncio.to_thread(self._processes.stop, grace_s)
        self._socket.close()


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is found before the weights are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ServerArgsError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return bound
