"""A trainer rank of SplitServe: the ordinary loop, fed by engine ranks; gradients are added up over trainers."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from sgling.srt.config.train_draft_args import TrainDraftArgs

from .rows import Sample
from .run import Setup, activations, announce, finish
from .streams import Link, Sizes
from .target import Features
from .trainer import Ranks, Trainer


class RemoteFeed:
    """Features of this rank's batches: of index i that is batch i * N + rank."""

    def __init__(self, link: Link, sizes: Sizes) -> None:
        self.link, self.sizes = link, sizes
        self.kept: tuple[int, Features] | None = None

    def features(self, index: int) -> Features:
        """See :class:`trainer.Feed`; the last batch is kept, so that it can be looked at before it is trained on."""
        if self.kept is None or self.kept[0] != index:
            batch = index * self.link.split.trainers + self.link.rank
            self.kept = (index, self.link.ask(batch, self.sizes))
        return self.kept[1]


class TrainerRanks(Ranks):
    """Sums over the trainers' group."""

    def __init__(self, group: dist.ProcessGroup, link: Link) -> None:
        self.group, self.device = group, link.device
        self.first, self.count = link.rank == 0, link.split.trainers

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """See :class:`Ranks`."""
        if self.count > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """One message for all gradients."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.group)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def agree(self, progress: float) -> float:
        """See :class:`Ranks`."""
        if self.count == 1:
            return progress
        shared = torch.tensor([progress], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, src=0, group=self.group)
        return float(shared)


def conversations(features: Features) -> list[Sample]:
    """The samples of a batch that came as packed rows; padding has no supervised token and is left out."""
    documents, answer = features.rows.documents.flatten().cpu(), features.rows.answer.flatten().cpu()
    counts = torch.zeros(int(documents.max()) + 1, dtype=torch.int64).index_add_(0, documents, answer.long())
    return [Sample(np.zeros(int(n), np.int32), np.ones(int(n), bool), True, 0.0) for n in counts if n]


def run_trainer(kind: str, args: TrainDraftArgs, link: Link, group: dist.ProcessGroup) -> None:
    """To the end of the run; the first trainer exports. Raises :class:`Stopped` after saving when an engine dies."""
    setup = Setup(kind, args, link.device, workers=0)
    first = link.rank == 0
    held_out = setup.held_out() if first else []
    task = setup.make_task(setup.target)
    config = setup.text.config
    widths = (len(setup.target.taps) * config.hidden_size, config.hidden_size)
    feed = RemoteFeed(link, Sizes(args.target_rows, args.row, *widths, activations(link.device)))
    trainer = Trainer(args, task, feed, held_out, TrainerRanks(group, link))
    start = trainer.step // trainer.steps_of_batch
    if first:
        link.store.set("start", str(start * link.split.trainers))
        announce(conversations(feed.features(start)) or [Sample(np.zeros(0, np.int32), np.zeros(0, bool), True, 0.0)])
    report = trainer.run()
    if first:
        finish(args, task, held_out, {"identity": setup.text.identity()._asdict(), "given": 0.0} | report)
