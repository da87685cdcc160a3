"""How commands reach a running server: readiness, authorization, its tokenizer."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from sgling.bench.http_stream import HttpStatusError, fetch
from sgling.bench.target import BenchError
from sgling.bench.tokenizer import BenchTokenizer, FastTokenizer
from sgling.srt.config.environ import bench_authorization
from sgling.srt.config.model_path import resolve_model_path

_POLL_S = 0.5
_REFUSED = (401, 403)


def authorized(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers with the authorization of the environment, unless they carry their own."""
    authorization = bench_authorization()
    return ({"Authorization": authorization} if authorization else {}) | dict(headers)


async def wait_until_ready(url: str, headers: Mapping[str, str], timeout_s: float) -> str:
    """Poll ``/v1/models``, saying so; returns the first model's name.

    Raises :class:`BenchError` when nobody answers, and at once when the server wants another key.
    """
    deadline, waiting = time.monotonic() + timeout_s, False
    while True:
        try:
            return (await fetch("GET", f"{url}/v1/models", headers=headers)).json()["data"][0]["id"]
        except (OSError, EOFError, HttpStatusError) as error:
            if isinstance(error, HttpStatusError) and error.status in _REFUSED:
                raise BenchError(f"{url} refuses this client (OPENAI_API_KEY is its key): {error}") from error
            if time.monotonic() > deadline:
                raise BenchError(f"no server at {url}: {error}") from error
        if not waiting:
            print(f"no answer from {url} yet; waiting {timeout_s:.0f} s at most", file=sys.stderr, flush=True)
            waiting = True
        await asyncio.sleep(_POLL_S)


async def load_tokenizer(name: str | None, url: str, headers: Mapping[str, str]) -> tuple[BenchTokenizer, Path]:
    """(tokenizer, its directory): the one named, else the server's."""
    if name is None:
        info = (await fetch("GET", f"{url}/model_info", headers=headers)).json()
        name = info.get("tokenizer_path") or info["model_path"]
    directory = resolve_model_path(name)
    return FastTokenizer(directory), directory
