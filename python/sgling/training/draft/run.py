"""One training run from flags to an exported drafter, in one process (split_serve.py spreads it over ranks)."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sgling.srt.config.train_draft_args import TrainDraftArgs

from .. import ops
from .conversations import Conversations, PromptStream
from .pool import supervised_summary, warn_if_given
from .regenerate import BatchedGenerator, Limits
from .rows import Sample
from .simulate import HeldOut, hold_out, simulate
from .sources import Source, make_source
from .target import Features, Target
from .tasks import Task, make_task
from .text_format import TextFormat
from .trainer import Trainer

logger = logging.getLogger(__name__)
EXPORT_DIR = "drafter"


def device_of(args: TrainDraftArgs) -> str:
    """Device of this process."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device


def activations(device: str) -> torch.dtype:
    """bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


class Setup:
    """What every rank needs: text format, prompt workers, target, and how to make the task."""

    def __init__(self, kind: str, args: TrainDraftArgs, device: str, workers: int) -> None:
        """Raises ServerArgsError, ModelConfigError or ModelLoadError for a target or drafter that does not fit."""
        self.args, self.device = args, device
        torch.manual_seed(args.seed)
        self.text = TextFormat(args.target)
        self.make_task: Callable[[Target], Task]
        taps, self.make_task = make_task(kind, args, self.text)
        self.talks = Conversations(self.text, args.conversations, args.seed, args.eval_prompts)
        self.stream = PromptStream(self.talks, workers)
        ops.use_compile(args.compile)
        self.target = Target(self.text, device, activations(device), taps)

    def held_out(self) -> list[HeldOut]:
        """Greedy answers of the target to held-out prompts, with features."""
        prompts = self.talks.held_out(self.args.eval_prompts)
        limits = Limits(self.args.row, self.args.max_new_tokens, min(len(prompts), self.args.slots))
        generator = BatchedGenerator(self.target, limits, (0.0,), seed=0)
        with ops.eager():
            answers = sorted(generator.answers(prompts), key=lambda answered: answered.index)
        scenarios = [prompt.scenario for prompt in prompts]
        return hold_out(self.target, answers, scenarios, (self.args.target_rows, self.args.row))


class LocalFeed:
    """The target runs in the trainer's process."""

    def __init__(self, source: Source, target: Target) -> None:
        self.source, self.target = source, target

    def features(self, index: int) -> Features:
        """See :class:`trainer.Feed`."""
        return self.target.features(self.source.batch(index))


def announce(samples: list[Sample]) -> float:
    """Before step 1: supervised tokens per sample, and whether the target wrote them; returns the share it did not."""
    print(supervised_summary(samples), flush=True)
    return warn_if_given(samples)


def finish(args: TrainDraftArgs, task: Task, held_out: list[HeldOut], facts: dict[str, Any]) -> Path:
    """Export the selected weights, rounded as the server reads them, and what they reached; returns the folder."""
    task.load_state({name: _rounded(value) for name, value in task.state().items()})
    folder = task.export(Path(args.output) / EXPORT_DIR)
    facts = facts | {"parameters": sum(value.numel() for value in task.parameters.values())}
    report = facts | {"simulated": simulate(task, held_out) if held_out else None, "flags": _flags(args)}
    path = folder / "training.json"
    path.write_text(json.dumps(report, ensure_ascii=False, indent=1, default=str) + "\n", encoding="utf-8")
    logger.info("exported %s", folder)
    return folder


def _rounded(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).float() if value.ndim > 1 or value.is_floating_point() else value


def _flags(args: TrainDraftArgs) -> dict[str, Any]:
    """Flags that were given, for the record."""
    defaults = TrainDraftArgs()
    fields = [field.name for field in dataclasses.fields(args)]
    return {name: getattr(args, name) for name in fields if getattr(args, name) != getattr(defaults, name)}


def train(kind: str, args: TrainDraftArgs) -> Path:
    """The whole run in this process; returns the folder of the exported drafter."""
    Path(args.output).mkdir(parents=True, exist_ok=True)
    setup = Setup(kind, args, device_of(args), args.workers)
    source = make_source(args, setup.target, setup.stream)
    try:
        given = announce(source.samples)
        held_out = [] if args.steps == 0 else setup.held_out()  # the pool alone is wanted
        task = setup.make_task(setup.target)
        report = Trainer(args, task, LocalFeed(source, setup.target), held_out).run()
    finally:
        source.close()
        setup.stream.close()
    return finish(args, task, held_out, {"identity": setup.text.identity()._asdict(), "given": given} | report)
