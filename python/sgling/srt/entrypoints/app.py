"""The FastAPI application: all routes over one tokenizer manager."""

from __future__ import annotations

import time
from typing import NamedTuple

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from sgling.srt.entrypoints import admin_routes, info_routes, native_routes, profile_routes
from sgling.srt.entrypoints.errors import install_error_handlers
from sgling.srt.entrypoints.middleware import ApiKeyMiddleware
from sgling.srt.entrypoints.openai.routes import install_openai
from sgling.srt.managers.scheduler_job import SchedulerJob
from sgling.srt.managers.tokenizer_manager import TokenizerManager
from sgling.srt.observability.metrics import ServerMetrics


class AppParts(NamedTuple):
    """What the routes work with.

    Attributes:
        manager: runs the requests.
        job: what the scheduler was built from.
        metrics: None unless ``--enable-metrics``.
        startup_time: seconds from the start of the program to a ready scheduler.
    """

    manager: TokenizerManager
    job: SchedulerJob
    metrics: ServerMetrics | None
    startup_time: float


def create_app(parts: AppParts) -> FastAPI:
    """Build the application. Routes find their parts in ``app.state``."""
    args = parts.manager.server_args
    app = FastAPI(title="SGLing", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.tokenizer_manager = parts.manager
    app.state.job = parts.job
    app.state.metrics = parts.metrics
    app.state.startup_time = parts.startup_time
    app.state.started_at = time.time()
    for router in (native_routes.router, admin_routes.router, info_routes.router, profile_routes.router):
        app.include_router(router)
    install_openai(app, parts.manager)
    install_error_handlers(app)
    # the last one added is the outermost: a refusal carries CORS headers too, and preflights need no key
    if args.api_key is not None or args.admin_api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=args.api_key, admin_api_key=args.admin_api_key)
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    return app
