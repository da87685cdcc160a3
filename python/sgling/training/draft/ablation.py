"""Ranks variants of one drafter: each trained for some steps, or at most a minute, on one pool, in turn over the GPUs.

The plan is YAML: ``base`` holds flags of ``sgling train-draft dspark``, ``variants`` a list of {name, ...flags}; every
variant is the base with its own flags on top, and is checked before the pool is made. Variants that share a GPU run at
speeds of their own: a ranking by steps is fairer than one by seconds. It is by simulated accept length, and says which
choice is worth a full run, and nothing about how far a full run gets.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from sgling.srt.config.environ import with_visible_gpu
from sgling.srt.config.flags import ServerArgsError, flag_fields, option_name
from sgling.srt.config.train_draft_args import AblateArgs, TrainDraftArgs
from sgling.srt.observability.machine import gpu_facts

logger = logging.getLogger(__name__)
MAX_SECONDS = 60.0
DEFAULT_TABLE = Path("docs/drafter-ablation.md")
OWN = ("output", "pool", "resume", "no_acceptance_check", "disable_tqdm", "split_serve")
"""Flags the command sets itself."""


class Variant(NamedTuple):
    """A named set of flags."""

    name: str
    flags: dict[str, Any]


class Outcome(NamedTuple):
    """What a variant reached; ``error`` instead when it did not train."""

    variant: Variant
    report: dict[str, Any] | None
    error: str | None


def read_plan(path: Path, args: AblateArgs) -> list[Variant]:
    """Variants with the base's flags merged in; raises ServerArgsError for a plan that cannot be run."""
    try:
        plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ServerArgsError(f"{path}: {error}") from error
    if not isinstance(plan, dict) or not isinstance(plan.get("variants"), list):
        raise ServerArgsError(f"{path}: needs a mapping with base and a list of variants")
    base, known = plan.get("base") or {}, {field.name for field, _ in flag_fields(TrainDraftArgs)}
    variants = []
    for entry in plan["variants"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ServerArgsError(f"{path}: a variant is a mapping with a name, got {entry!r}")
        merged = base | {key: value for key, value in entry.items() if key != "name"}
        if unknown := sorted(set(merged) - (known - set(OWN))):
            raise ServerArgsError(f"{path}: variant {entry['name']}: unknown flag {unknown[0]!r}")
        if args.seconds is not None:
            merged = {key: value for key, value in merged.items() if key != "steps"} | {"seconds": args.seconds}
        if error := fault(merged):
            raise ServerArgsError(f"{path}: variant {entry['name']}: {error}")
        variants.append(Variant(entry["name"], merged))
    chosen = [variant for variant in variants if args.only is None or variant.name in args.only]
    if len({variant.name for variant in variants}) != len(variants) or not chosen:
        raise ServerArgsError(f"{path}: names of variants must differ, and one must be chosen")
    return chosen


def fault(flags: Mapping[str, Any]) -> str | None:
    """What a run with these flags would refuse, before anything is made for it."""
    if "steps" not in flags and not 0 < flags.get("seconds", 0) <= MAX_SECONDS:
        return f"give steps, or seconds in 0 ... {MAX_SECONDS:.0f}"
    try:
        args = TrainDraftArgs(**flags)
        return args.error() or args.unread("dspark")
    except TypeError as error:
        return f"a flag has a value of another type: {error}"


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """Flags as ``sgling train-draft`` takes them."""
    line: list[str] = []
    for name, value in flags.items():
        if value is True:
            line.append(option_name(name))
        elif isinstance(value, list):
            line += [option_name(name), *map(str, value)]
        elif value is not None and value is not False:
            line.append(f"{option_name(name)}={value}")
    return line


def run_variant(variant: Variant, folder: Path, pool: Path, gpu: int) -> Outcome:
    """Train one variant in a process of its own, on one GPU."""
    own = ["--output", str(folder), "--pool", str(pool), "--no-acceptance-check", "--disable-tqdm"]
    line = [sys.executable, "-m", "sgling", "train-draft", "dspark", *command_line(variant.flags), *own]
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("%s: training, log in %s", variant.name, folder / "log.txt")
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        status = subprocess.run(line, stdout=log, stderr=log, env=with_visible_gpu(gpu), check=False).returncode
    if status:
        last = (folder / "log.txt").read_text(encoding="utf-8").strip().splitlines()[-1:]
        return Outcome(variant, None, f"exit status {status}: {' '.join(last)[:200]}")
    return Outcome(variant, json.loads((folder / "drafter" / "training.json").read_text(encoding="utf-8")), None)


def common_pool(variant: Variant, folder: Path) -> Path:
    """The pool of the base, made once: every variant is trained on the same text."""
    path = folder / "base" / "pool.safetensors"
    if not path.is_file():
        logger.info("making the common pool: %s", path)
        flags = {key: value for key, value in variant.flags.items() if key != "seconds"} | {"steps": 0}
        line = [sys.executable, "-m", "sgling", "train-draft", "dspark", *command_line(flags)]
        line += ["--output", str(path.parent), "--no-acceptance-check", "--disable-tqdm"]
        done = subprocess.run(line, env=with_visible_gpu(0), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the common pool was not made: {done.stderr.strip().splitlines()[-1:]}")
    else:
        logger.warning("training on the pool of an earlier run, whatever this plan says of pools: %s", path)
    return path


def changes(variant: Variant, first: Variant) -> str:
    """Flags that differ from the first variant."""
    names = sorted(set(variant.flags) | set(first.flags))
    return ", ".join(
        f"{name} {variant.flags.get(name)}" for name in names if variant.flags.get(name) != first.flags.get(name)
    )


def format_table(outcomes: Sequence[Outcome], where: str) -> str:
    """Markdown: variants by simulated accept length, with each scenario's."""
    reached = [outcome for outcome in outcomes if outcome.report is not None]
    ranked = sorted(reached, key=lambda outcome: -outcome.report["simulated"]["accept_length"])
    scenarios = list(ranked[0].report["simulated"]["scenarios"]) if ranked else []
    head = ["rank", "variant", "changed", "parameters", "steps", "mean", *scenarios]
    today = datetime.now(UTC).date().isoformat()
    lines = [
        "# Drafter ablation",
        "",
        f"Written by `sgling train-draft ablate` on {today}, {where}. **A ranking only**:",
        "every variant is trained for a few steps, or a minute. Simulated accept length, greedy, on held-out prompts.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for rank, (variant, report, _) in enumerate(ranked, 1):
        lengths = report["simulated"]["scenarios"]
        numbers = [f"{report['simulated']['accept_length']:.2f}"]
        numbers += [f"{lengths[name]['accept_length']:.2f}" for name in scenarios]
        cells = [str(rank), variant.name, changes(variant, outcomes[0].variant) or "(base)", str(report["parameters"])]
        lines.append(f"| {' | '.join([*cells, str(report['steps']), *numbers])} |")
    lines += [f"\nNot trained: {o.variant.name} ({o.error})." for o in outcomes if o.error]
    return "\n".join(lines) + "\n"


def ablate(args: AblateArgs) -> str:
    """Run every variant; returns the table, which is also written to ``--table``."""
    variants = read_plan(Path(args.plan), args)
    pool = Path(args.pool) if args.pool else common_pool(variants[0], args.output)
    gpus = max(1, torch.cuda.device_count())
    with ThreadPoolExecutor(args.parallel) as threads:
        jobs = [
            threads.submit(run_variant, variant, args.output / variant.name, pool, index % gpus)
            for index, variant in enumerate(variants)
        ]
        outcomes = [job.result() for job in jobs]
    where = f"{gpus} x {gpu_facts()[0][1].split(',')[0]}" if torch.cuda.is_available() else "a CPU"
    table = format_table(outcomes, f"{args.parallel} at a time on {where}")
    path = args.table or DEFAULT_TABLE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table, encoding="utf-8")
    if not any(outcome.report for outcome in outcomes):
        raise RuntimeError(f"no variant was trained: {outcomes[0].error}")
    return table
