"""Routes that tell about the server: health, model cards, resolved arguments, metrics."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response

from sgling.srt.config.environ import read_environ
from sgling.srt.config.model_path import is_embedded
from sgling.srt.entrypoints.errors import json_response
from sgling.srt.entrypoints.native_routes import manager_of
from sgling.srt.managers.generate_req import RequestError
from sgling.srt.managers.response import WEIGHT_VERSION

router = APIRouter()

PAGE = Path(__file__).parent / "page" / "index.html"


@router.get("/")
async def root(request: Request) -> Response:
    """A page to try the server out for browsers, a sign of life for everybody else."""
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(PAGE, media_type="text/html", headers={"Cache-Control": "no-cache"})
    return PlainTextResponse("SGLing server is running.\n")


@router.get("/ping")
async def ping() -> Response:
    """The HTTP process answers."""
    return Response()


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests should be sent here: 503 while starting, unhealthy or stopping."""
    manager = manager_of(request)
    return Response(status_code=200 if manager.ready and manager.is_healthy else 503)


@router.get("/health")
@router.get("/health_generate")
async def health(request: Request) -> Response:
    """Whether the engine works: 503 until warm, as soon as shutdown starts, and when a probe gets no answer."""
    manager, environ = manager_of(request), read_environ()
    if not manager.ready or manager.died is not None:
        return Response(status_code=503)
    if not environ.enable_health_endpoint_generation and request.url.path == "/health":
        return Response()
    alive = await manager.health_check(environ.health_check_timeout)
    return Response(status_code=200 if alive and manager.ready else 503)


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The one model served."""
    return json_response({"object": "list", "data": [_model_card(request)]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """The card of the served model; any other name is a 404 in the nested OpenAI form."""
    card = _model_card(request)
    if model_id == card["id"]:
        return json_response(card)
    error = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    return json_response({"error": {"message": f"The model '{model_id}' does not exist", **error}}, 404)


def _model_card(request: Request) -> dict:
    manager = manager_of(request)
    name = manager.server_args.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": int(request.app.state.started_at),
        "owned_by": "sgling",
        "root": name,
        "parent": None,
        "max_model_len": manager.context_len,
    }


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """What is served; the paths are such that a client on this machine can load the tokenizer from them."""
    args, job = manager_of(request).server_args, request.app.state.job
    tokenizer = args.tokenizer_path
    return json_response(
        {
            "model_path": str(job.model_dir) if is_embedded(args.model_path) else args.model_path,
            "tokenizer_path": str(job.tokenizer_dir or job.model_dir) if is_embedded(tokenizer) else tokenizer,
            "served_model_name": args.served_model_name,
            "is_generation": True,
            "preferred_sampling_params": args.preferred_sampling_params,
            "weight_version": WEIGHT_VERSION,
            "load_format": args.load_format,
            "reasoning_parser": args.reasoning_parser,
            "tool_call_parser": args.tool_call_parser,
            "disaggregation_mode": args.disaggregation_mode,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "bailing_hybrid",
            "architectures": [job.model_config.architecture],
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """See :meth:`TokenizerManager.server_info`; the bench copies it into its results."""
    info = await manager_of(request).server_info()
    return json_response({**info, "startup_time": request.app.state.startup_time})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text; 404 without ``--enable-metrics``."""
    registry, manager = request.app.state.metrics, manager_of(request)
    if registry is None:
        return json_response({"detail": "Not Found"}, 404)
    with suppress(RequestError):  # of a dead scheduler the counters are still worth reading
        registry.update_from_state(await manager.internal_state())
    body, content_type = registry.render()
    return Response(body, media_type=content_type)
