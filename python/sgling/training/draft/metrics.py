"""Metrics of a run: a JSONL file, tensorboard's event files, and one progress bar."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)
SHOWN = ("ce", "l1", "expected_length", "loss_1", "hit_1", "tokens_per_s")


def _event_writer(folder: Path) -> Any | None:
    """tensorboard's writer; None (said once) where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("tensorboard is not installed: metrics go to metrics.jsonl only (pip install sgling[train])")
        return None
    return SummaryWriter(str(folder))


class Journal:
    """Writes every figure in all places."""

    def __init__(self, folder: Path, total: int | float, done: int | float, unit: str, quiet: bool) -> None:
        """``total``, ``done``: extent and present place of the bar in ``unit`` ("step" or "s")."""
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self.events = _event_writer(folder / "tensorboard")
        form = "{l_bar}{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}] {postfix}"
        self.bar = tqdm(total=total, initial=done, unit=unit, desc="train", disable=quiet, bar_format=form)

    def log(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        """One line; numbers are also drawn by tensorboard under ``kind``."""
        plain = {name: round(value, 5) for name, value in figures.items() if isinstance(value, int | float)}
        rest = {name: value for name, value in figures.items() if name not in plain}
        line = {"kind": kind, "step": step} | plain | rest
        self.file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.file.flush()
        if self.events is not None:
            for name, value in plain.items():
                self.events.add_scalar(f"{kind}/{name}", value, step)
        if kind == "train":
            self.bar.set_postfix({name: plain[name] for name in SHOWN if name in plain})

    def move(self, place: int | float) -> None:
        """Advance the bar."""
        self.bar.update(min(place, self.bar.total) - self.bar.n)

    def close(self) -> None:
        """Flush everything."""
        self.bar.close()
        self.file.close()
        if self.events is not None:
            self.events.close()
