"""The HTTP server over a real scheduler and a tiny random model, in one process: what the routes accept really runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from server.live_server import LiveServer
from server.serving_helpers import small_tokenizer
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.distributed.parallel_state import ParallelState
from sgling.srt.managers.channel import QueueChannel
from sgling.srt.managers.scheduler import Scheduler

POOL_COUNTERS = ("kv_available_tokens", "req_slots_available", "state_slots_available")


def real_server(model_dir: Path, **scheduler_args) -> LiveServer:
    """A server (not started) of the checkpoint in ``model_dir``; keyword arguments are the scheduler's."""

    def make(channel: QueueChannel) -> Scheduler:
        options = {"speculative_algorithm": "NEXTN", "random_seed": 0, "max_running_requests": 8, **scheduler_args}
        args = ServerArgs.from_kwargs(model_path=str(model_dir), device="cpu", **options)
        return Scheduler(args, ModelConfig.from_dir(model_dir), channel, ParallelState.single(), small_tokenizer())

    return LiveServer(scheduler_type=make)


def state(client) -> dict:
    """The scheduler's internal state."""
    return client.get("/server_info").json()["internal_states"][0]


def pool(client) -> tuple[int, ...]:
    """Free KV tokens, request rows and state slots."""
    found = state(client)
    return tuple(found[name] for name in POOL_COUNTERS)


def wait_until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def requests_inside(client) -> int:
    """Requests that run or wait, from one snapshot: between two a request may move from one count to the other."""
    found = state(client)
    return found["num_running_reqs"] + found["num_queue_reqs"]


def wait_idle(client) -> None:
    """Until no request runs or waits."""
    wait_until(lambda: requests_inside(client) == 0)
