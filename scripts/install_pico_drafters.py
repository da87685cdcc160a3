"""Puts the drafters of ``scripts/pico_drafters.sh`` into the package: weights, card, log, acceptance floor.

    python scripts/install_pico_drafters.py OUT    # OUT: folder with b8.tar, b16.tar, logs.tar and evaluation.json

A drafter of another target than the one in the package is refused. ``evaluation.json`` is what ``sgling eval drafters``
writes of them; without it the cards have no measured part.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tarfile
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from sgling.bench.evals.drafters import SCENARIOS, best
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.srt.config.train_draft_args import TrainDraftArgs
from sgling.train_draft import acceptance_check
from sgling.training.draft.ablation import command_line
from sgling.training.draft.text_format import TextFormat

TARGET = "ling3-pico"
WEIGHT_LIMIT = 36_000_000
"""Bytes of all weight files in the package."""
LOG_EVERY = 20
EVALUATION = "evaluation_serving.json"
NOT_SHOWN = ("output", "no_acceptance_check", "disable_tqdm", "workers")
"""Flags of the run that a card leaves out."""


def unpack(archive: Path, folder: Path) -> dict[str, Any]:
    """Copy a drafter's files and an extract of its metrics; returns its training.json. Refuses another target's."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        source = Path(scratch) / "drafter"
        facts = json.loads((source / "training.json").read_text(encoding="utf-8"))
        wanted = TextFormat(TARGET).identity()._asdict()
        if facts["identity"] != wanted:
            raise SystemExit(f"{archive}: trained on {facts['identity']}, the package has {wanted}")
        folder.mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors", "training.json"):
            shutil.copy(source / name, folder / name)
            (folder / name).chmod(0o644)
        lines = (Path(scratch) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [line for index, line in enumerate(lines) if index % LOG_EVERY == 0 or '"simulate"' in line]
    (folder / "training_log.jsonl").write_text("\n".join([*kept, lines[-1]]) + "\n", encoding="utf-8")
    return facts


def written(out: Path, block: int) -> tuple[int, int]:
    """(answers, tokens) that the target wrote for a drafter's pool, from the run's log."""
    with tarfile.open(out / "logs.tar") as tar:
        log = tar.extractfile(f"b{block}.log").read().decode("utf-8")
    answers, tokens = re.search(r"the target wrote (\d+) answers, (\d+) tokens", log).groups()
    return int(answers), int(tokens)


def own_share(facts: dict[str, Any], answers: int, tokens: int) -> float:
    """Share of the supervised tokens in a batch that the target wrote: conversations are drawn by ``given_share``."""
    flags = facts["flags"]
    given = tokens / (1 - facts["given"]) * facts["given"] / flags["given"]
    own = tokens / answers
    return (1 - flags["given_share"]) * own / ((1 - flags["given_share"]) * own + flags["given_share"] * given)


def made_of(name: str, facts: dict[str, Any]) -> list[str]:
    """Rows of the card: what the drafter is."""
    config = json.loads((ASSETS_DIR / name / "config.json").read_text(encoding="utf-8"))
    own, size = config["dspark_config"], (ASSETS_DIR / name / "model.safetensors").stat().st_size
    return [
        "| | |",
        "|---|---|",
        f"| parameters | {facts['parameters']:,}, {size / 1e6:.2f} MB in BF16; embedding and head are the target's |",
        f"| layers | {config['num_hidden_layers']} of hidden {config['hidden_size']}, feed-forward "
        f"{config['intermediate_size']}, {config['num_attention_heads']} heads of {config['head_dim']}, dense |",
        f"| reads | outputs of the target's layers {', '.join(map(str, own['target_layer_ids']))} (counted from 0) |",
        f"| heads | {own['markov_head_type']} Markov of rank {own['markov_rank']}, confidence |",
        f"| context | trained on rows of {config['max_position_embeddings']} tokens; later drafts get worse |",
    ]


def training(name: str, facts: dict[str, Any], pool: tuple[int, int]) -> list[str]:
    """Part of the card: command, steps, tokens, seconds, data."""
    flags = {key: value for key, value in facts["flags"].items() if key not in NOT_SHOWN}
    positions = facts["steps"] * flags["rows"] * flags["row"]
    temperatures = ", ".join(map(str, flags.get("temperatures") or TrainDraftArgs().settings))
    command = textwrap.wrap(
        f"sgling train-draft dspark {' '.join(command_line(flags))}",
        110,
        initial_indent="    ",
        subsequent_indent="      ",
        break_on_hyphens=False,
    )
    return [
        "## Training",
        "",
        *[line + " \\" for line in command[:-1]],
        command[-1],
        "",
        "On one NVIDIA H200 (2026-11-30, torch 2.11) by `scripts/pico_drafters.sh`; the other drafter ran beside it",
        "on a second one.",
        "",
        "| | |",
        "|---|---|",
        f"| steps | {facts['steps']:,} in {facts['seconds']:.0f} s, {flags['rows'] * flags['row']:,} tokens of packed "
        f"text each, {positions / 1e6:.1f} M in all (prompts and padding included, conversations repeat) |",
        f"| weights | of step {facts['selected_step']:,}, chosen by simulated accept length, every "
        f"{flags['eval_every']} steps and at the end |",
        f"| written by the target | {pool[0]:,} answers, {pool[1]:,} tokens in {flags['regenerate_seconds']:.0f} s, "
        f"temperatures {temperatures} in turn |",
        f"| given | {flags['given']:,} conversations of the generator the target was trained with |",
        f"| shares | the target wrote {100 * (1 - facts['given']):.0f} % of the pool's supervised tokens; "
        f"{100 * (1 - flags['given_share']):.0f} % of the conversations of a batch are its own, about "
        f"{100 * own_share(facts, *pool):.0f} % of the supervised tokens trained on |",
        "",
        "Steps end by wall clock: a repeat gives a drafter like this one, not the same bits. `training.json` has",
        "flags, hashes of the target and simulated accept lengths, `training_log.jsonl` an extract of the metrics.",
    ]


def lengths_table(facts: dict[str, Any], report: dict[str, Any], name: str) -> list[str]:
    """Rows of the card: accept length, TPOT and round time beside NEXTN's."""
    drafter, nextn = report["drafters"][name]["all"], report["drafters"]["NEXTN"]
    lines = [
        "| scenario | accept length | NEXTN's longest | simulated | TPOT | NEXTN's shortest | round | NEXTN's |",
        f"|{'---|' * 8}",
    ]
    for scenario in SCENARIOS:
        own, (width, length) = drafter[scenario], best(nextn, scenario)
        fast, tpot = min(((key, entry[scenario]["tpot_ms"]) for key, entry in nextn.items()), key=lambda pair: pair[1])
        simulated = facts["simulated"]["scenarios"][scenario]["accept_length"]
        cells = [scenario, f"**{own['accept_length']:.2f}**", f"{length:.2f} (width {width})", f"{simulated:.2f}"]
        cells += [f"{own['tpot_ms']:.2f}", f"{tpot:.2f} (width {fast})"]
        cells += [f"{own['tpot_x_accept_ms']:.1f}", f"{nextn[width][scenario]['tpot_x_accept_ms']:.1f} (width {width})"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *positions_table(drafter, int(name.rsplit("-b", 1)[1]))]


def positions_table(drafter: dict[str, Any], block: int) -> list[str]:
    """Rows of the card: acceptance of each draft, given that all before it were accepted."""
    lines = [f"| draft | {' | '.join(str(draft) for draft in range(1, block + 1))} |", f"|{'---|' * (block + 1)}"]
    for scenario in SCENARIOS:
        rates = drafter[scenario]["acceptance_by_position"]
        cells = " | ".join("-" if rate is None else f"{rate:.2f}"[rate < 1 :] for rate in rates)
        lines.append(f"| {scenario} | {cells} |")
    return lines


def measured(facts: dict[str, Any], report: dict[str, Any], name: str) -> list[str]:
    """Part of the card: accept lengths of the serving path."""
    asked, widths = report["questions"], sorted(map(int, report["drafters"]["NEXTN"]))
    return [
        "## Measured",
        "",
        f"    OMP_NUM_THREADS=1 sgling eval drafters --num-questions {asked['num_questions']} --widths "
        f"{' '.join(map(str, widths))} \\",
        f"      --max-new-tokens {asked['max_new_tokens']} --json {EVALUATION}",
        "",
        f"{report['date']}, {report['where']['device'].upper()}, {report['where']['dtype']}, one thread, other work on "
        "the machine's second core:",
        f"{asked['num_questions']} prompts a scenario, made of words that neither model has seen, through the chat "
        "template, greedy, one at",
        "a time. Times are of this CPU, in ms; a round is TPOT x accept length. Simulated: training's own check, "
        f"{facts['flags']['eval_prompts']}",
        f"other prompts. `{EVALUATION}` has NEXTN at every width. The second table is the share of drafts accepted",
        "where all before them were.",
        "",
        *lengths_table(facts, report, name),
        "",
        "Template text is easy to predict: these are measurements of this model and say nothing about a large one.",
    ]


def card(name: str, facts: dict[str, Any], report: dict[str, Any] | None, pool: tuple[int, int]) -> str:
    """The README of a drafter."""
    block = name.rsplit("-b", 1)[1]
    lines = [
        f"# {name}",
        "",
        f"DSPARK drafter of the embedded model {TARGET}, blocks of {block} drafts. The text is the target's for every",
        "drafter; this one decides how many tokens a step commits.",
        "",
        f"    sgling serve --speculative-algorithm DSPARK --speculative-draft-model-path {name}",
        "",
        *made_of(name, facts),
        "",
        *training(name, facts, pool),
        "",
        *(measured(facts, report, name) if report else []),
        "",
        f"The weights carry the project's licence, as the target's do. What {TARGET} itself can do: its own card.",
    ]
    return "\n".join(lines) + "\n"


def own_report(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The report with NEXTN and one drafter."""
    drafters = {key: report["drafters"][key] for key in ("NEXTN", name)}
    return report | {"drafters": drafters, "comparison": {name: report["comparison"][name]}}


def main() -> None:
    """Install what is there; exit with a message when the weights would be too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that scripts/pico_drafters.sh wrote")
    out = parser.parse_args().out
    if not out.is_dir():
        parser.error(f"OUT {out}: no such folder")
    report = json.loads((out / "evaluation.json").read_text()) if (out / "evaluation.json").is_file() else None
    for block in (8, 16):
        archive, name = out / f"b{block}.tar", f"{TARGET}-dspark-b{block}"
        if not archive.is_file():
            print(f"{archive}: not there, {name} is left as it is")
            continue
        folder = ASSETS_DIR / name
        facts, own = unpack(archive, folder), own_report(report, name) if report else None
        if own:
            (folder / EVALUATION).write_text(json.dumps(own, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card(name, facts, own, written(out, block)), encoding="utf-8")
        acceptance_check("dspark", TARGET, folder)
    total = sum(path.stat().st_size for path in ASSETS_DIR.rglob("*.safetensors"))
    print(f"weights in the package: {total / 1e6:.2f} MB of {WEIGHT_LIMIT / 1e6:.0f}")
    if total > WEIGHT_LIMIT:
        raise SystemExit("too large: leave a drafter out")


if __name__ == "__main__":
    main()
