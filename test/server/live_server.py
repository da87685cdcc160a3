"""A real HTTP server over a fake scheduler, in a thread: sockets, disconnects and streams are the true ones."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx
import uvicorn

from server.serving_helpers import running_manager, small_model_config, small_tokenizer
from sgling.srt.entrypoints.app import AppParts, create_app
from sgling.srt.managers.request_observer import MetricsObserver
from sgling.srt.managers.scheduler_job import SchedulerJob
from sgling.srt.observability.metrics import ServerMetrics


class LiveServer:
    """Serves from :meth:`start` to :meth:`stop`; ``manager`` and ``scheduler`` may be looked at from the test."""

    def __init__(self, with_metrics: bool = False, tokenizer=None, **arg_changes):
        self._metrics = ServerMetrics({"model_name": "m"}) if with_metrics else None
        self._tokenizer = tokenizer or small_tokenizer()
        self._changes = arg_changes
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.base_url = ""

    async def _serve(self) -> None:
        observers = [MetricsObserver(self._metrics)] if self._metrics else []
        async with running_manager(self._tokenizer, observers, **self._changes) as (self.manager, self.scheduler):
            config = small_model_config()
            job = SchedulerJob(self.manager.server_args, config, Path("/model"), Path("/model"))
            app = create_app(AppParts(self.manager, job, self._metrics, 1.5))
            config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
            self._uvicorn = uvicorn.Server(config)
            self._uvicorn.capture_signals = lambda: _Nothing()
            serving = asyncio.create_task(self._uvicorn.serve())
            while not self._uvicorn.started:
                await asyncio.sleep(0.005)
            port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
            self.address = ("127.0.0.1", port)
            self.base_url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await serving

    def start(self) -> LiveServer:
        """Listen."""
        self._thread.start()
        if not self._ready.wait(15):
            raise TimeoutError("the server did not start")
        return self

    def stop(self) -> None:
        """End."""
        self._uvicorn.should_exit = True
        self._thread.join(10)

    def client(self, **options) -> httpx.Client:
        """An HTTP client."""
        return httpx.Client(base_url=self.base_url, timeout=10, **options)


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False
