"""Trains ling3-pico: joint trunk + NEXTN stage, NEXTN chain stage on the frozen trunk, evaluation, export.

    python -m sgling.training.pretrain --output DIR --seconds 420 --nextn-seconds 80 --workers 14 --compile

Stages end by wall clock (``--seconds``) or, for tests, by step count (``--steps``). A checkpoint is written every
minute; ``--resume`` continues from it with the same data, because every data block is a function of (seed, index).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.train_args import PretrainOptions

from . import ops
from .data import Block, BlockStream, load_tokenizer
from .evaluate import evaluate
from .export import read_checkpoint, round_to_disk, write_checkpoint
from .generator.mix import PICO_DIR
from .losses import Rows, chain_losses, joint_losses, rows_layout
from .model import Pico
from .optimizer import PicoOptimizer

NEXTN_WEIGHT = 0.3
CHAIN_DECAY = 0.85
ANSWERS_ONLY_FROM = 0.8
"""Share of the joint stage after which only assistant tokens are scored."""


class Clock:
    """Progress of a stage in [0, 1]: by steps when a step count is given, else by wall clock, earlier time included."""

    def __init__(self, seconds: float, steps: int | None, before: float = 0.0) -> None:
        self.seconds, self.steps, self.before = seconds, steps, before
        self.started = time.monotonic()

    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.started

    def progress(self, step: int) -> float:
        return min(1.0, step / self.steps if self.steps else self.elapsed() / self.seconds)


class Journal:
    """JSONL metrics in a file and a progress line on the terminal."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: TextIO = path.open("a", encoding="utf-8")

    def write(self, **fields: Any) -> None:
        self.file.write(json.dumps(fields, ensure_ascii=False) + "\n")
        self.file.flush()

    def bar(self, stage: str, progress: float, text: str) -> None:
        filled = int(progress * 30)
        print(f"{stage} [{'#' * filled}{'.' * (30 - filled)}] {progress:6.1%} {text}", file=sys.stderr, flush=True)


def rate_factor(progress: float, step: int, base: float) -> float:
    """Linear warm-up over 40 steps, constant to 35 % of the stage, then linear to zero."""
    return base * min(1.0, (step + 1) / 40) * min(1.0, max(0.0, (1.0 - progress) / 0.65))


def to_device(block: Block, device: str) -> tuple[torch.Tensor, torch.Tensor, ops.Layout]:
    tokens = torch.from_numpy(block.tokens).to(device, torch.int64)
    answer = torch.from_numpy(block.answer).to(device)
    return tokens, answer, ops.make_layout(block.starts.tolist(), len(block.tokens), device)


def to_rows(block: Block, row: int, device: str) -> Rows:
    """The stream cut into rows; a document that crosses a row end goes on as a new one."""
    length = len(block.tokens) // row * row
    starts = sorted({*block.starts.tolist(), *range(0, length, row)})
    layout = ops.make_layout([start for start in starts if start < length], length, device)
    tokens = torch.from_numpy(block.tokens[:length]).to(device, torch.int64)
    answer = torch.from_numpy(block.answer[:length]).to(device)
    return Rows(*(part.view(-1, row) for part in (tokens, answer, layout.documents, layout.positions)))


class Run:
    """One training run: model, data, clock and files."""

    def __init__(self, options: PretrainOptions) -> None:
        self.options = options
        self.stream = BlockStream(options.seed, options.tokens, options.workers)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(1)
        ops.use_compile(options.compile)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.model = Pico(ModelConfig.from_dir(options.config or PICO_DIR), dtype).to(self.device)
        if options.init:
            read_checkpoint(self.model, options.init)
        self.journal = Journal(options.output / "metrics.jsonl")
        self.checkpoint = options.output / "checkpoint.pt"
        self.saved = json_state(options.resume)

    def save(self, stage: str, step: int, elapsed: float, optimizer: PicoOptimizer) -> None:
        state = {
            "stage": stage,
            "step": step,
            "elapsed": elapsed,
            "block": self.stream.index,
            "model": self.model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(state, self.checkpoint)

    def restart_stream(self, index: int) -> None:
        self.stream.close()
        self.stream = BlockStream(self.options.seed, self.options.tokens, self.options.workers, start=index)

    def restore(self, stage: str, optimizer: PicoOptimizer) -> tuple[int, float]:
        """(step, elapsed) of the saved checkpoint if it belongs to ``stage``, else zeros."""
        if self.saved is None or self.saved["stage"] != stage:
            return 0, 0.0
        self.model.load_state_dict(self.saved["model"])
        optimizer.load_state_dict(self.saved["optimizer"])
        self.restart_stream(self.saved["block"])
        return self.saved["step"], self.saved["elapsed"]

    def joint_step(self, progress: float, optimizer: PicoOptimizer, step: int) -> dict[str, torch.Tensor | float]:
        tokens, answer, layout = to_device(self.stream.next(), self.device)
        weight = self.options.prompt_weight if progress < ANSWERS_ONLY_FROM else 0.0
        losses = joint_losses(self.model, tokens, answer, layout, weight)
        (losses.main + NEXTN_WEIGHT * losses.nextn).backward()
        factor = rate_factor(progress, step, self.options.rate)
        optimizer.step(factor)
        optimizer.zero_grad()
        moves = torch.stack([moe.update_bias(2e-3 * min(1.0, factor)) for moe in self.model.moe_layers()])
        return {**losses._asdict(), "imbalance": moves.max(), "factor": factor}

    def joint(self) -> None:
        """Trains everything together."""
        options = self.options
        self.model.train()
        optimizer = PicoOptimizer(list(self.model.named_parameters()))
        step, before = self.restore("joint", optimizer)
        clock = Clock(options.seconds, options.steps, before)
        saved = clock.elapsed()
        while (progress := clock.progress(step)) < 1.0:
            values = self.joint_step(progress, optimizer, step)
            step += 1
            if step % options.log_every == 0 or step <= 3:
                self.log("joint", step, clock.elapsed(), progress, values)
            if clock.elapsed() - saved > 60:
                saved = clock.elapsed()
                self.save("joint", step, saved, optimizer)
        self.save("joint", step, clock.elapsed(), optimizer)
        write_checkpoint(self.model, options.output / "model")

    def log(self, stage: str, step: int, elapsed: float, progress: float, values: dict[str, Any]) -> None:
        plain = {name: round(float(torch.as_tensor(value).detach()), 5) for name, value in values.items()}
        speed = step * self.options.tokens / max(elapsed, 1e-6)
        self.journal.write(stage=stage, step=step, elapsed=round(elapsed, 2), tokens_per_s=round(speed), **plain)
        self.journal.bar(
            stage,
            progress,
            f"step {step} {speed / 1e3:.0f}k tok/s " + " ".join(f"{k} {v:.3f}" for k, v in plain.items()),
        )

    def nextn_step(self, progress: float, optimizer: PicoOptimizer, step: int) -> dict[str, Any]:
        rows = to_rows(self.stream.next(), self.options.row, self.device)
        with torch.no_grad():
            hidden = self.model.trunk(rows.tokens.flatten(), rows_layout(rows)).unflatten(0, rows.tokens.shape)
        losses, hits = chain_losses(self.model, rows, hidden, self.options.chain)
        sum(CHAIN_DECAY**index * loss for index, loss in enumerate(losses)).backward()
        factor = rate_factor(progress, step, 0.5)
        optimizer.step(factor)
        optimizer.zero_grad()
        self.model.nextn.layer.ffn.update_bias(1e-3 * factor)
        named = {f"loss_{index + 1}": loss for index, loss in enumerate(losses)} | {
            f"hit_{index + 1}": hit for index, hit in enumerate(hits)
        }
        return {**named, "factor": factor}

    def nextn(self) -> None:
        """Trains the NEXTN layer alone with the self-fed chain loss, on the rounded trunk."""
        options = self.options
        round_to_disk(self.model)
        self.model.eval()
        self.model.nextn.train()
        self.model.requires_grad_(False)
        self.model.nextn.requires_grad_(True)
        optimizer = PicoOptimizer(list(self.model.nextn.named_parameters()))
        step, before = self.restore("nextn", optimizer)
        clock = Clock(options.nextn_seconds, options.nextn_steps, before)
        while (progress := clock.progress(step)) < 1.0:
            values = self.nextn_step(progress, optimizer, step)
            step += 1
            if step % options.log_every == 0 or step <= 3:
                self.log("nextn", step, clock.elapsed(), progress, values)

    def finish(self) -> None:
        """Exports first, then evaluates, so that a late failure loses nothing."""
        round_to_disk(self.model)
        write_checkpoint(self.model, self.options.output / "model")
        self.stream.close()
        if self.options.evaluate:
            ops.use_compile(False)
            started = time.monotonic()
            report = evaluate(self.model, load_tokenizer(), self.options.evaluate, self.options.evaluate_length)
            report["seconds"] = round(time.monotonic() - started, 1)
            (self.options.output / "evaluation.json").write_text(
                json.dumps(report, ensure_ascii=False, indent=1), encoding="utf-8"
            )
            short = {
                name: {k: v for k, v in entry.items() if k != "examples"}
                for name, entry in report.items()
                if isinstance(entry, dict)
            }
            print(json.dumps(short, ensure_ascii=False, indent=1))


def json_state(path: Path | None) -> dict[str, Any] | None:
    """A saved checkpoint, or None."""
    return None if path is None else torch.load(path, map_location="cpu", weights_only=True)


def train(options: PretrainOptions) -> Run:
    """All stages; stages of zero length are skipped."""
    run = Run(options)
    if options.steps != 0 and options.seconds > 0 and not (run.saved and run.saved["stage"] == "nextn"):
        run.joint()
    if options.nextn_steps != 0 and options.nextn_seconds > 0:
        run.nextn()
    run.finish()
    return run


if __name__ == "__main__":
    train(PretrainOptions.parse("sgling.training.pretrain"))
