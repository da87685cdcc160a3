"""Shared pieces of the server tests: a small tokenizer, a small model config, resolved arguments, a live manager."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from server.fake_scheduler import FakeScheduler
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.managers.channel import QueueChannel
from sgling.srt.managers.generate_req import GenerateReqInput
from sgling.srt.managers.scheduler_job import serve_scheduler
from sgling.srt.managers.tokenizer_manager import TokenizerManager

VOCAB_SIZE = 512
IDS = [40, 41, 42, 43]  # a prompt
CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "서울은 한국의 수도입니다. 안녕하세요 세계! " * 4,
    "Příliš žluťoučký kůň úpěl ďábelské ódy. " * 4,
    "family 👩‍👩‍👧‍👦 flag 🏳️‍🌈 " * 4,
]


@cache
def small_tokenizer() -> Tokenizer:
    """A byte-level BPE with two special tokens (0 = pad, 1 = end) and at most 290 entries: many split characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def small_model_config() -> ModelConfig:
    """The embedded model's config with a vocabulary of VOCAB_SIZE rows."""
    raw = json.loads((ASSETS_DIR / "ling3-pico" / "config.json").read_text())
    return ModelConfig.from_dict({**raw, "vocab_size": VOCAB_SIZE})


def server_args(**changes) -> ServerArgs:
    """Resolved arguments of a CPU server of the embedded model with speculation on."""
    return ServerArgs.from_kwargs(**{"model_path": "ling3-pico", "device": "cpu", "random_seed": 1, **changes})


@asynccontextmanager
async def running_manager(tokenizer=None, observers=(), scheduler_type=FakeScheduler, **arg_changes):
    """A manager over a fake scheduler in a thread; yields (manager, scheduler)."""
    channel = QueueChannel()
    scheduler = scheduler_type(channel)
    thread = threading.Thread(target=serve_scheduler, args=(None, channel, _Rank0, lambda *_: scheduler), daemon=True)
    thread.start()
    args = server_args(**arg_changes)
    manager = TokenizerManager(args, small_model_config(), channel.tokenizer_side(), tokenizer, observers)
    await asyncio.wait_for(manager.start(), 5)
    manager.ready = True
    try:
        yield manager, scheduler
    finally:
        await manager.close()
        await asyncio.to_thread(thread.join, 5)


class _Rank0:
    rank = 0


async def until(condition, timeout_s: float = 3.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def request(**body) -> GenerateReqInput:
    """A native request; ``max_new_tokens`` and friends may be given flat."""
    names = ("max_new_tokens", "n", "ignore_eos", "sampling_seed")
    params = {name: body.pop(name) for name in names if name in body}
    return GenerateReqInput.from_json({"input_ids": IDS, "sampling_params": params, **body})


async def collect(manager, obj) -> list[dict]:
    """Every answer to a request."""
    return [answer async for answer in manager.generate_request(obj)]


def serve(test, **options):
    """Run an async test against a manager over a fake scheduler."""

    async def body():
        async with running_manager(small_tokenizer(), **options) as (manager, scheduler):
            await test(manager, scheduler)

    asyncio.run(body())
