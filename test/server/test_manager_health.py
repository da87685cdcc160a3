"""Tokenizer manager over a scripted scheduler: its health, a scheduler that dies or falls silent, a drain."""

from __future__ import annotations

import asyncio

import pytest

from server.fake_scheduler import CRASH, MUTE, SLOW
from server.serving_helpers import collect, request, serve, until
from sgling.srt.managers.generate_req import RequestError


def test_dead_scheduler_fails_everyone_and_turns_health_red():
    async def test(manager, scheduler):
        assert await manager.health_check(2.0)
        waiting = asyncio.create_task(collect(manager, request(input_ids=[MUTE])))
        await until(lambda: manager.num_live == 1)
        with pytest.raises(RequestError, match="scripted crash") as error:
            await collect(manager, request(input_ids=[CRASH]))
        assert error.value.status_code == 500
        with pytest.raises(RequestError, match="scripted crash"):
            await waiting
        assert not await manager.health_check(2.0) and not manager.is_healthy and not manager.ready
        for call in (collect(manager, request()), manager.internal_state(), manager.flush_cache()):
            with pytest.raises(RequestError, match="scripted crash") as error:
                await call
            assert error.value.status_code == 503
        await asyncio.wait_for(manager.drain(), 1)

    serve(test)


def test_health_probes_never_pile_up():
    async def test(manager, scheduler):
        results = await asyncio.gather(*(manager.health_check(2.0) for _ in range(50)))
        assert all(results)
        assert len(scheduler.seen) == 1 and scheduler.seen[0].startswith("HEALTH_CHECK")
        await until(lambda: not scheduler.live)
        task = asyncio.create_task(collect(manager, request(input_ids=[MUTE])))
        await until(lambda: manager.num_live == 1)
        assert await manager.health_check(2.0)  # busy without output: the loop answers, no probe request is queued
        assert len(scheduler.seen) == 2
        task.cancel()

    serve(test)


def test_silent_scheduler_is_unhealthy_until_it_speaks_again():
    async def test(manager, scheduler):
        handle, held = scheduler.handle, []
        scheduler.handle = held.append
        for _ in range(3):
            assert not await manager.health_check(0.05)
        assert not manager.is_healthy
        kinds = [type(message).__name__ for message in held]
        assert kinds.count("TokenizedGenerateReqInput") == 1  # one probe, however often it was asked for
        scheduler.handle = handle
        for message in held:
            handle(message)
        await until(lambda: manager.is_healthy)  # its late answers count, without another probe
        await until(lambda: not scheduler.live)
        assert await manager.health_check(2.0) and manager.is_healthy

    serve(test)


def test_drain_waits_for_the_last_request():
    async def test(manager, scheduler):
        running = asyncio.create_task(collect(manager, request(input_ids=[SLOW], max_new_tokens=12)))
        await until(lambda: manager.num_live == 1)
        drain = asyncio.create_task(manager.drain())
        await asyncio.sleep(0.01)
        assert not manager.ready and not drain.done()
        late = asyncio.create_task(collect(manager, request(max_new_tokens=3)))  # still taken
        await asyncio.wait_for(drain, 3)
        assert manager.num_live == 0
        assert len((await running)[0]["output_ids"]) == 12 and len((await late)[0]["output_ids"]) == 3

    serve(test)
