"""Batches of packed rows: from a pool, or answered anew for every batch. Batch ``i`` is a function of (seed, i)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from tqdm import tqdm

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.train_draft_args import TrainDraftArgs

from ..ops import eager
from .conversations import Prompt, PromptStream
from .pool import Pool, read_pool
from .regenerate import BatchedGenerator, EngineGenerator, Limits
from .rows import RowBatch, Sample, pack
from .target import Target

logger = logging.getLogger(__name__)
POOL_FILE = "pool.safetensors"
GIVEN_FROM = 1 << 40
"""Number of the first conversation with given answers: none is also regenerated."""


class Source(Protocol):
    """Where batches come from."""

    samples: list[Sample]
    """Samples known before step 1."""

    def batch(self, index: int) -> RowBatch:
        """Rows of one target forward."""

    def close(self) -> None:
        """End helpers."""


def make_generator(args: TrainDraftArgs, target: Target) -> BatchedGenerator | EngineGenerator:
    """The generator asked for."""
    limits = Limits(args.row, args.max_new_tokens, args.slots)
    kind = BatchedGenerator if args.generator == "batched" else EngineGenerator
    return kind(target, limits, args.settings, args.seed)


def regenerate_samples(args: TrainDraftArgs, target: Target, prompts: Iterator[Prompt]) -> list[Sample]:
    """Answers by the target, in the order of the prompts."""
    if not args.regenerate:
        return []
    until = None if args.regenerate_seconds is None else time.monotonic() + args.regenerate_seconds
    generator = make_generator(args, target)
    done, tokens, begin = [], 0, time.monotonic()
    with eager(), tqdm(total=args.regenerate, desc="regenerate", disable=args.disable_tqdm, unit="answer") as bar:
        for answered in generator.answers(prompts, until=until):
            done.append(answered)
            tokens += len(answered.ids) - answered.prompt_length
            bar.update()
    generator.close()
    seconds = time.monotonic() - begin
    logger.info("the target wrote %d answers, %d tokens, %.0f tokens/s", len(done), tokens, tokens / seconds)
    return [answered.sample() for answered in sorted(done, key=lambda answered: answered.index)]


def make_pool(args: TrainDraftArgs, target: Target, stream: PromptStream) -> Pool:
    """The pool of ``--pool``, of an interrupted run, or a new one (written to ``--output``)."""
    identity = target.text.identity()
    if args.pool:
        samples = [sample for path in args.pool for sample in read_pool(path, identity).samples]
        return Pool(tuple(samples), identity)
    path = Path(args.output) / POOL_FILE
    if args.resume and path.is_file():
        return read_pool(path, identity)
    prompts = stream.prompts(0, args.regenerate)  # asked for first: the target waits for them
    given = stream.prompts(GIVEN_FROM, args.given)
    samples = regenerate_samples(args, target, prompts)
    samples += [Sample(prompt.whole, prompt.answer, False, -1.0) for prompt in given]
    if not samples:
        raise ServerArgsError("no data: --regenerate and --given are both 0")
    pool = Pool(tuple(samples), identity)
    pool.write(path)
    return pool


class PoolSource:
    """Random samples of a pool; samples without a supervised token are left out."""

    def __init__(self, args: TrainDraftArgs, pool: Pool, pad: int) -> None:
        self.args, self.pad = args, pad
        self.samples = list(pool.samples)
        useful = [sample for sample in self.samples if sample.answer.any()]
        self.own = [sample for sample in useful if sample.regenerated]
        self.given = [sample for sample in useful if not sample.regenerated]

    def batch(self, index: int) -> RowBatch:
        """Draws without replacement until the rows are full."""
        args = self.args
        rng = np.random.default_rng((args.seed, index))
        both = bool(self.own and self.given)
        orders = [iter(rng.permutation(len(part))) for part in (self.own, self.given)]

        def drawn():
            while True:
                take_given = rng.random() < args.given_share if both else not self.own
                place = next(orders[take_given], None)
                if place is None:
                    return
                yield (self.given if take_given else self.own)[place]

        return pack(drawn(), args.target_rows, args.row, self.pad)

    def close(self) -> None:
        """Nothing runs."""


class FreshSource:
    """Every batch is answered by the target when it is asked for: prompts ``i * n`` ... ``(i + 1) * n - 1``."""

    def __init__(self, args: TrainDraftArgs, target: Target, stream: PromptStream) -> None:
        self.args, self.target, self.stream = args, target, stream
        self.generator = make_generator(args, target)

    @cached_property
    def samples(self) -> list[Sample]:
        """Those of the first batch."""
        return self.answer(0)

    def answer(self, index: int) -> list[Sample]:
        """Samples of one batch, in the order of their prompts."""
        count = self.args.fresh_conversations
        prompts = self.stream.prompts(index * count, count)
        with eager():
            found = sorted(self.generator.answers(prompts, first=index * count), key=lambda answered: answered.index)
        return [answered.sample() for answered in found]

    def batch(self, index: int) -> RowBatch:
        """Answers, packed; what does not fit the rows is dropped."""
        samples = self.samples if index == 0 else self.answer(index)
        return pack(samples, self.args.target_rows, self.args.row, self.target.text.pad)

    def close(self) -> None:
        """Stop generator and workers."""
        self.generator.close()
        self.stream.close()


def make_source(args: TrainDraftArgs, target: Target, stream: PromptStream) -> Source:
    """The source the flags ask for."""
    if args.fresh:
        return FreshSource(args, target, stream)
    pool = make_pool(args, target, stream)
    stream.close()
    return PoolSource(args, pool, target.text.pad)
