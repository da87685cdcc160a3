"""Puts the drafters of ``scripts/pico_drafters.sh`` into the package: weights, card, log, acceptance floor.

    python scripts/install_pico_drafters.py OUT    # OUT: folder with b8.tar, b16.tar and evaluation.json

A drafter of another target than the one in the package is refused. ``evaluation.json`` is what ``sgling eval drafters``
writes; without it the card has the simulated figures alone.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from sgling.bench.evals.drafters import JUDGED, SCENARIOS, best
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.train_draft import acceptance_check
from sgling.training.draft.text_format import TextFormat

TARGET = "ling3-pico"
WEIGHT_LIMIT = 36_000_000
"""Bytes of all weight files in the package."""
LOG_EVERY = 20


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


def simulated_table(facts: dict[str, Any]) -> list[str]:
    """Rows of the card: simulated accept length and acceptance by position."""
    lines = ["| held-out prompts | accept length | acceptance by position |", "|---|---|---|"]
    for scenario, entry in facts["simulated"]["scenarios"].items():
        rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in entry["acceptance_by_position"])
        lines.append(f"| {scenario} | {entry['accept_length']:.2f} | {rates} |")
    return lines


def served_table(report: dict[str, Any], name: str) -> list[str]:
    """Rows of the card: served accept length beside NEXTN's best width, TPOT x accept length of both."""
    widths, nextn = report["drafters"][name], report["drafters"]["NEXTN"]
    lines = [
        "| scenario | this drafter | NEXTN's best | round: this, NEXTN (TPOT x accept length, ms) |",
        "|---|---|---|---|",
    ]
    for scenario in SCENARIOS:
        width, length = best(nextn, scenario)
        own = widths["all"][scenario]
        rounds = f"{own['tpot_x_accept_ms']:.2f}, {nextn[width][scenario]['tpot_x_accept_ms']:.2f}"
        lines.append(f"| {scenario} | {own['accept_length']:.2f} | {length:.2f} (width {width}) | {rounds} |")
    return lines


def card(name: str, facts: dict[str, Any], report: dict[str, Any] | None) -> str:
    """The README of a drafter."""
    config = json.loads((ASSETS_DIR / name / "config.json").read_text(encoding="utf-8"))
    size = (ASSETS_DIR / name / "model.safetensors").stat().st_size
    own = config["dspark_config"]
    lines = [
        f"# {name}",
        "",
        f"DSPARK drafter of the embedded model {TARGET}, block {own['block_size']}:",
        "",
        f"    sgling serve --speculative-algorithm DSPARK --speculative-draft-model-path {name}",
        "",
        f"{facts['parameters']:,} parameters ({size / 1e6:.2f} MB, BF16); embedding and head are the target's.",
        f"{config['num_hidden_layers']} layers, feed-forward {config['intermediate_size']},",
        f"taps {own['target_layer_ids']},",
        f"{own['markov_head_type']} Markov head of rank {own['markov_rank']}, confidence head.",
        f"Trained on rows of {config['max_position_embeddings']} tokens.",
        "",
        "Trained by `scripts/pico_drafters.sh` (`sgling train-draft dspark`) on one NVIDIA H200:",
        f"{facts['steps']} steps in {facts['seconds']:.0f} s, weights of step {facts['selected_step']}, chosen by",
        f"simulated accept length. {100 * (1 - facts['given']):.0f} % of the pool's supervised tokens were written by",
        "the target (temperatures 0, 0, 0.7, 1.0), the rest are the generator's.",
        "Flags and hashes: `training.json`; metrics: `training_log.jsonl`.",
        "",
        "Simulated, greedy, on prompts made of words that neither model has seen:",
        "",
        *simulated_table(facts),
    ]
    if report is not None and name_in(report, name):
        where = " ".join(str(value) for value in report["where"].values())
        lines += ["", f"Served (`sgling eval drafters`, {report['date']}, {where}), greedy, one request at a time:", ""]
        lines += served_table(report, name_in(report, name))
    lines += [
        "",
        "Template text is easy to predict: these figures say nothing about a large model. Licence: the project's.",
    ]
    return "\n".join(lines) + "\n"


def name_in(report: dict[str, Any], name: str) -> str | None:
    """The report's key of a drafter: its name, or the run's folder it was measured in, told apart by their depth."""
    if name in report["drafters"]:
        return name
    depth = int(name.rsplit("-b", 1)[1])
    for key, widths in report["drafters"].items():
        positions = next(iter(widths.values()))[JUDGED[0]]["acceptance_by_position"]
        if key != "NEXTN" and len(positions) == depth:
            return key
    return None


def main() -> None:
    """Install what is there; exit with a message when the weights would be too large."""
    out = Path(sys.argv[1])
    report = json.loads((out / "evaluation.json").read_text()) if (out / "evaluation.json").is_file() else None
    for block in (8, 16):
        archive, name = out / f"b{block}.tar", f"{TARGET}-dspark-b{block}"
        if not archive.is_file():
            print(f"{archive}: not there, {name} is left as it is")
            continue
        facts = unpack(archive, ASSETS_DIR / name)
        (ASSETS_DIR / name / "README.md").write_text(card(name, facts, report), encoding="utf-8")
        acceptance_check("dspark", TARGET, ASSETS_DIR / name)
    total = sum(path.stat().st_size for path in ASSETS_DIR.rglob("*.safetensors"))
    print(f"weights in the package: {total / 1e6:.2f} MB of {WEIGHT_LIMIT / 1e6:.0f}")
    if total > WEIGHT_LIMIT:
        raise SystemExit("too large: leave a drafter out")


if __name__ == "__main__":
    main()
