"""Judges measured cells against a contract: rows of promise, measured value and verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sgling.bench.contract.bounds import Bound
from sgling.bench.contract.measure import ROLLBACK, Cell
from sgling.bench.contract.schema import Contract
from sgling.bench.gate.correctness import Check

BASELINE_FORMAT = 1


class Row(NamedTuple):
    """One promise at one place. ``verdict`` is "pass", "fail" or "skip"; ``note`` says why where that is not plain."""

    place: str
    metric: str
    promise: str
    measured: float | None
    verdict: str
    note: str = ""


class Baseline(NamedTuple):
    """Values per cell of an earlier measurement, and what was measured there."""

    cells: dict[str, dict[str, float]]
    facts: dict

    def value(self, cell: str, metric: str) -> float | None:
        """A recorded value."""
        return self.cells.get(cell, {}).get(metric)


def load_baseline(path: Path | None) -> Baseline:
    """Read a baseline; an absent file is an empty baseline (its bounds then fail and say so)."""
    if path is None or not path.is_file():
        return Baseline({}, {})
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("format") != BASELINE_FORMAT:
        raise ValueError(f"{path}: not a baseline of format {BASELINE_FORMAT}")
    return Baseline(raw["cells"], raw["facts"])


def save_baseline(path: Path, cells: Sequence[Cell], facts: dict) -> None:
    """Write a baseline."""
    raw = {"format": BASELINE_FORMAT, "facts": facts, "cells": {cell.name: cell.values for cell in cells}}
    path.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def judge_bound(bound: Bound, cell: Cell, baseline: Baseline) -> Row:
    """One bound at one cell. A figure that was not measured fails: a promise nobody can check is not kept."""
    measured, recorded = cell.values.get(bound.metric), baseline.value(cell.name, bound.metric)
    promise = bound.promise(recorded)
    if measured is None:
        return Row(cell.name, bound.metric, promise, None, "fail", "not measured: the server does not report it")
    if bound.limit(recorded) is None:
        return Row(cell.name, bound.metric, promise, measured, "fail", "no baseline for this cell: --record-baseline")
    return Row(cell.name, bound.metric, promise, measured, "pass" if bound.holds(measured, recorded) else "fail")


def judge_contract(contract: Contract, cells: Sequence[Cell], baseline: Baseline, checks: Sequence[Check]) -> list[Row]:
    """All rows: cell by cell, then rollback, then correctness."""
    bounds = {scenario.name: scenario.bounds for scenario in contract.scenarios}
    bounds[ROLLBACK] = contract.rollback or []
    rows = []
    for cell in cells:
        rows += [judge_bound(bound, cell, baseline) for bound in bounds[cell.scenario]]
        if cell.name == ROLLBACK:
            note = cell.errors[0] if cell.errors else ""
            rows.append(Row(ROLLBACK, "ready", "same answers", None, "fail" if cell.errors else "pass", note))
        elif cell.errors and all(row.verdict != "fail" for row in rows if row.place == cell.name):
            rows.append(Row(cell.name, "requests", "no error", None, "fail", cell.errors[0]))
    rows += [Row("server", f"greedy {check.name}", "exact", None, check.status, check.detail) for check in checks]
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def format_rows(rows: Sequence[Row]) -> str:
    """The table, and what failed by name."""
    head = ("place", "metric", "promise", "measured", "verdict")
    shown = [(row.place, row.metric, row.promise, _number(row.measured), row.verdict.upper()) for row in rows]
    widths = [max(len(line[i]) for line in (head, *shown)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    lines = [line(head), line(["-" * width for width in widths])]
    for row, cells in zip(rows, shown, strict=True):
        lines.append(line(cells) + (f"  {row.note}" if row.note and row.verdict != "pass" else ""))
    failed = [f"{row.place} {row.metric}" for row in rows if row.verdict == "fail"]
    lines.append(f"FAILED: {', '.join(failed)}" if failed else "the contract holds")
    return "\n".join(lines)
