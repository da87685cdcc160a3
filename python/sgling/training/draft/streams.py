"""How features travel between ranks: two tensors a batch, asked for through the job's store."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from sgling.srt.config.train_draft_args import Split

from .rows import RowBatch
from .target import Features

END = "end"
"""Key of the store that ends the job: "done" or why not."""
POLL_S = 0.001


class Stopped(Exception):
    """The job has ended while this rank was waiting."""


class Sizes(NamedTuple):
    """Shape of a batch: rows, tokens a row, tapped width, hidden width; dtype of features."""

    rows: int
    length: int
    taps: int
    hidden: int
    dtype: torch.dtype


class Link:
    """A rank's end of the job's store and of the process group."""

    def __init__(self, store: dist.Store, rank: int, split: Split, device: str) -> None:
        self.store, self.rank, self.split, self.device = store, rank, split, device

    def engine_of(self, batch: int) -> int:
        """Rank that makes a batch."""
        return self.split.trainers + batch % self.split.engines

    def trainer_of(self, batch: int) -> int:
        """Rank that trains on a batch."""
        return batch % self.split.trainers

    def ended(self) -> str | None:
        """Why the job has ended, None while it runs."""
        return self.store.get(END).decode() if self.store.check([END]) else None

    def wait_for(self, key: str) -> None:
        """Until a key is set. Raises :class:`Stopped` when the job ends before."""
        while not self.store.check([key]):
            if reason := self.ended():
                raise Stopped(reason)
            time.sleep(POLL_S)

    def send(self, batch: int, features: Features) -> None:
        """Send a batch that was asked for: integers of the rows, then taps and hidden side by side."""
        rows = features.rows
        integers = torch.stack((rows.tokens, rows.answer.long(), rows.documents, rows.positions)).int()
        values = torch.cat((features.taps, features.hidden), -1)
        self.store.set(f"sending/{batch}", "1")
        for tensor in (integers, values.contiguous()):
            dist.send(tensor, self.trainer_of(batch))

    def ask(self, batch: int, sizes: Sizes) -> Features:
        """Ask for a batch and receive it. Raises :class:`Stopped` when the job ends before it is sent."""
        self.store.set(f"want/{batch}", "1")
        self.wait_for(f"sending/{batch}")
        integers = torch.empty(4, sizes.rows, sizes.length, dtype=torch.int32, device=self.device)
        width = sizes.taps + sizes.hidden
        values = torch.empty(sizes.rows, sizes.length, width, dtype=sizes.dtype, device=self.device)
        for tensor in (integers, values):
            dist.recv(tensor, self.engine_of(batch))
        tokens, answer, documents, positions = integers.long()
        taps, hidden = values.split((sizes.taps, sizes.hidden), -1)
        return Features(RowBatch(tokens, answer.bool(), documents, positions), taps, hidden)
