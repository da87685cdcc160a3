"""Runs one function per vocabulary shard in lock step, so that sharded operators are tested without processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch


class ThreadReduce:
    """ShardReduce over the threads of :func:`run_sharded`; deliberately combines shards in rotated order."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def _exchange(self, value):
        self.slots[self.rank] = value
        self.barrier.wait()
        values = self.slots[self.rank :] + self.slots[: self.rank]
        self.barrier.wait()
        return values

    def max(self, x):
        return torch.stack(self._exchange(x)).amax(dim=0)

    def sum(self, x):
        return torch.stack(self._exchange(x)).sum(dim=0)

    def best(self, score, ids):
        scores, tokens = zip(*self._exchange((score, ids)), strict=True)
        scores, tokens = torch.stack(scores), torch.stack(tokens)
        top = scores.amax(dim=0)
        return top, torch.where(scores == top, tokens, torch.iinfo(torch.int64).max).amin(dim=0)


def run_sharded(shards, function):
    """``function(rank, reduce)`` for every rank at once; returns the results in rank order."""
    slots, barrier = [None] * shards, threading.Barrier(shards)

    def work(rank):
        try:
            return function(rank, ThreadReduce(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(shards) as pool:
        return list(pool.map(work, range(shards)))
