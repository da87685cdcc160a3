"""The training loop: features in, optimizer steps, checkpoints, selection by simulated accept length.

Everything random is a function of (seed, step), so a checkpoint's step is its data position and its random state.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.train_draft_args import TrainDraftArgs

from ..optimizer import PicoOptimizer
from ..pretrain import Clock, rate_factor
from .metrics import Journal
from .simulate import HeldOut, simulate
from .target import Features
from .tasks import Task

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.pt"
DEFAULT_STEPS = 200


class Feed(Protocol):
    """Where features come from."""

    def features(self, index: int) -> Features:
        """Batch ``index``: rows and what the target computes of them."""


class Ranks:
    """What trainer ranks add up; one rank adds nothing."""

    first = True

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over trainer ranks."""
        return value

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Gradients of the global mean, in place."""

    def agree(self, progress: float) -> float:
        """The first rank's progress: clocks differ, and all must stop at one step."""
        return progress


class Trainer:
    """One run of one task."""

    def __init__(
        self, args: TrainDraftArgs, task: Task, feed: Feed, held_out: list[HeldOut], ranks: Ranks | None = None
    ) -> None:
        self.args, self.task, self.feed, self.held_out = args, task, feed, held_out
        self.ranks = ranks or Ranks()
        self.output = Path(args.output)
        self.optimizer = PicoOptimizer(list(task.parameters.items()))
        self.step, self.before = 0, 0.0
        self.best: dict[str, Any] = {"value": 0.0, "step": -1, "state": None}
        self.selected = -1  # step of the last simulation
        self.steps_of_batch = args.target_rows // args.rows * args.passes
        if args.resume:
            self._restore()
        steps = args.steps if args.steps is not None or args.seconds is not None else DEFAULT_STEPS
        self.clock = Clock(args.seconds or 0.0, steps, self.before)
        by_steps = steps is not None
        total, done, unit = (steps, self.step, "step") if by_steps else (args.seconds, self.before, "s")
        quiet = args.disable_tqdm or not self.ranks.first
        self.journal = Journal(self.output, total, done, unit, quiet) if self.ranks.first else None

    def progress(self) -> float:
        """Share of the run that is done."""
        return 1.0 if self.clock.steps == 0 else self.ranks.agree(self.clock.progress(self.step))

    def _restore(self) -> None:
        path = self.output / CHECKPOINT
        if not path.is_file():
            raise ServerArgsError(f"--resume: no checkpoint in {self.output}")
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0] or "the file ends too early"
            raise ServerArgsError(f"--resume: {path} is damaged: {reason}") from error
        self.step, self.before, self.best = saved["step"], saved["elapsed"], saved["best"]
        self.task.load_state(saved["task"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def save(self) -> None:
        """Checkpoint, written beside the old one and moved over it."""
        if not self.ranks.first:
            return
        state = {
            "step": self.step,
            "elapsed": self.clock.elapsed(),
            "best": self.best,
            "task": self.task.state(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, self.output / f"{CHECKPOINT}.new")
        (self.output / f"{CHECKPOINT}.new").replace(self.output / CHECKPOINT)

    def one_step(self, features: Features, progress: float) -> dict[str, Any]:
        """Forward, backward, update; figures to log."""
        result = self.task.loss(features, self.step, progress, self.ranks.sum)
        result.loss.backward()
        self.ranks.sum_gradients(list(self.task.parameters.values()))
        factor = rate_factor(progress, self.step, self.args.rate)
        self.optimizer.step(factor)
        self.optimizer.zero_grad()
        self.task.after_step(factor)
        return {"loss": result.loss, "factor": factor, **result.figures}

    def part(self, features: Features) -> Features:
        """Rows of this step out of the batch."""
        parts = self.args.target_rows // self.args.rows
        index = self.step % self.steps_of_batch % parts
        return features.part(index * self.args.rows, (index + 1) * self.args.rows)

    def run(self) -> dict[str, Any]:
        """Train to the end; returns facts of the run. The task then holds the selected weights."""
        self.clock.started = time.monotonic()
        try:
            self._loop()
        except BaseException:
            self.save()
            raise
        finally:
            if self.journal is not None:
                self.journal.close()
        self.save()
        if self.best["state"] is not None:
            self.task.load_state(self.best["state"])
        seconds = self.clock.elapsed()
        tokens = self.step * self.args.rows * self.args.row
        rate = tokens / max(seconds, 1e-9)
        logger.info("%d steps, %d tokens in %.1f s: %.0f tokens/s", self.step, tokens, seconds, rate)
        return {"steps": self.step, "seconds": round(seconds, 1), "selected_step": self.best["step"]}

    def _loop(self) -> None:
        saved = logged = self.clock.elapsed()
        features, index = None, -1
        while (progress := self.progress()) < 1.0:
            if self.step // self.steps_of_batch != index:
                index = self.step // self.steps_of_batch
                features = self.feed.features(index)
            figures = self.one_step(self.part(features), progress)
            self.step += 1
            if self.journal is not None:
                logged = self._log(figures, logged)
            if self.step % self.args.eval_every == 0:
                self.select()
            if self.clock.elapsed() - saved >= self.args.save_every:
                saved = self.clock.elapsed()
                self.save()
        if self.selected != self.step:
            self.select()

    def _log(self, figures: dict[str, Any], since: float) -> float:
        """Every ``--log-every`` steps; returns the time of the last line."""
        self.journal.move(self.step if self.clock.steps else self.clock.elapsed())
        if self.step % self.args.log_every and self.step > 2:
            return since
        plain = {name: float(torch.as_tensor(value).detach()) for name, value in figures.items()}
        now = self.clock.elapsed()  # the figures above waited for the device: the rate is a true one
        steps = self.args.log_every if self.step % self.args.log_every == 0 else 1
        rate = steps * self.args.rows * self.args.row / max(now - since, 1e-9)
        self.journal.log("train", self.step, plain | {"tokens_per_s": round(rate), "elapsed": round(now, 2)})
        return now

    def select(self) -> None:
        """Simulate; keep the weights when they accept more than any before."""
        if not self.held_out or not self.ranks.first:
            return
        self.selected = self.step
        report = simulate(self.task, self.held_out)
        value = report["accept_length"]
        if value > self.best["value"]:
            self.best = {"value": value, "step": self.step, "state": self.task.state(), "report": report}
        self.journal.log("simulate", self.step, report | {"seconds": round(time.monotonic() - self.clock.started, 1)})
        logger.info("step %d: simulated accept length %.3f (best %.3f)", self.step, value, self.best["value"])
