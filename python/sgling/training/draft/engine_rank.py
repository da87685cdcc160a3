"""An engine rank of SplitServe: answers fresh conversations, computes their features, sends them when asked."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import torch

from sgling.srt.config.train_draft_args import TrainDraftArgs

from .run import Setup
from .sources import FreshSource
from .streams import POLL_S, Link, Stopped
from .target import Features


class Outbox:
    """Batches that are ready, at most ``size``; a thread of its own sends those that trainers want."""

    def __init__(self, link: Link, size: int) -> None:
        self.link, self.size = link, size
        self.ready: dict[int, Features] = {}
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self.thread.start()

    def put(self, batch: int, features: Features) -> None:
        """Wait for room, then leave a batch to be sent. Raises :class:`Stopped` when the job ends, or what broke."""
        while True:
            if self.error is not None:
                raise self.error
            with self.lock:
                if len(self.ready) < self.size:
                    self.ready[batch] = features
                    return
            time.sleep(POLL_S)

    def _wanted(self) -> int | None:
        with self.lock:
            waiting = sorted(self.ready)
        return next((batch for batch in waiting if self.link.store.check([f"want/{batch}"])), None)

    def _run(self) -> None:
        try:
            if self.link.device.startswith("cuda"):
                torch.cuda.set_device(self.link.device)
            while (reason := self.link.ended()) is None:
                batch = self._wanted()
                if batch is None:
                    time.sleep(POLL_S)
                    continue
                self.link.send(batch, self.ready[batch])
                with self.lock:
                    del self.ready[batch]
            raise Stopped(reason)
        except BaseException as error:  # handed to the thread that fills the box
            self.error = error


def run_engine(kind: str, args: TrainDraftArgs, link: Link) -> None:
    """Until the job ends. One line a batch goes to ``engine-I.jsonl``: seconds of work and of waiting for room."""
    number = link.rank - link.split.trainers
    setup = Setup(kind, args, link.device, args.workers // link.split.engines)
    source = FreshSource(args, setup.target, setup.stream)
    outbox = Outbox(link, args.queue)
    link.wait_for("start")
    batch = int(link.store.get("start"))
    batch += (number - batch) % link.split.engines
    journal = (Path(args.output) / f"engine-{number}.jsonl").open("a", encoding="utf-8")
    try:
        while True:
            begin = time.monotonic()
            features = setup.target.features(source.batch(batch))
            tokens = int(features.rows.answer.sum())  # waits for the device: the time is a true one
            made = time.monotonic()
            outbox.put(batch, features)
            waited = time.monotonic() - made
            line = {"batch": batch, "seconds": made - begin, "waited": waited, "answer_tokens": tokens}
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            batch += link.split.engines
    except Stopped as stopped:
        if str(stopped) != "done":
            raise
    finally:
        journal.close()
        source.close()
