"""Ablations: one pool, variants in processes of their own, a ranked table; one that fails is named in it."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from sgling.cli import main
from sgling.srt.config.train_draft_args import TrainDraftArgs
from sgling.training.draft.ablation import Outcome, Variant, command_line, common_pool, format_table, read_plan
from train.miniature import write_target
from train.test_draft_runs import SMALL

ROOT = Path(__file__).resolve().parents[2]
OWN = ("disable_tqdm",)


def test_table_is_written_in_order_of_accept_length(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = {name: value for name, value in SMALL.items() if name not in OWN} | {"steps": 3, "regenerate": 6}
    base["target"] = str(write_target(tmp_path / "target"))
    variants = [{"name": "base"}, {"name": "mla", "attention": "mla"}, {"name": "broken", "taps": [5]}]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"base": base, "variants": variants}))
    status = main(["train-draft", "ablate", "plan.yaml", "--output", "runs", "--table", "table.md", "--parallel", "2"])
    text = (tmp_path / "table.md").read_text()
    assert status == 0 and text.strip() in capsys.readouterr().out
    assert "| mla | attention mla |" in text and "| base | (base) |" in text and "Not trained: broken" in text
    reports = [json.loads((tmp_path / "runs" / name / "drafter/training.json").read_text()) for name in ("base", "mla")]
    pools = {report["flags"]["pool"][0] for report in reports}
    assert pools == {"runs/base/pool.safetensors"} and all(report["steps"] == 3 for report in reports)


def outcome(name: str, length: float | None) -> Outcome:
    variant = Variant(name, {"layers": len(name)})
    if length is None:
        return Outcome(variant, None, "exit status 1: no memory")
    scenarios = {"coding": {"accept_length": length}}
    return Outcome(
        variant, {"simulated": {"accept_length": length, "scenarios": scenarios}, "parameters": 7, "steps": 9}, None
    )


def test_a_pool_that_lies_there_is_taken_and_named(tmp_path, caplog):
    """It may be that of another plan."""
    pool = tmp_path / "base" / "pool.safetensors"
    pool.parent.mkdir()
    pool.touch()
    assert common_pool(Variant("base", {}), tmp_path) == pool
    assert f"the pool of an earlier run, whatever this plan says of pools: {pool}" in caplog.text


def test_ranking():
    table = format_table([outcome("a", 2.0), outcome("bb", 3.0), outcome("ccc", None)], "here")
    rows = [line for line in table.splitlines() if line.startswith(("| 1", "| 2"))]
    assert rows == ["| 1 | bb | layers 2 | 7 | 9 | 3.00 | 3.00 |", "| 2 | a | (base) | 7 | 9 | 2.00 | 2.00 |"]
    assert "Not trained: ccc (exit status 1: no memory)." in table


def test_flags_survive_the_command_line():
    flags = {"taps": [-1, 0], "rate": 0.5, "no_confidence": True, "fresh": False, "seconds": 30}
    read = TrainDraftArgs.read(command_line(flags), "dspark")
    assert (read.taps, read.rate, read.no_confidence, read.fresh, read.seconds) == ([-1, 0], 0.5, True, False, 30.0)


def test_plan_of_the_embedded_drafter_covers_every_choice():
    from sgling.srt.config.train_draft_args import AblateArgs

    plan = read_plan(ROOT / "scripts" / "drafter_ablation.yaml", AblateArgs())
    changed = {name for variant in plan for name, value in variant.flags.items() if value != plan[0].flags.get(name)}
    assert {"taps", "layers", "attention", "rope_style", "markov_type", "length", "l1"} <= changed
    for variant in plan:
        assert TrainDraftArgs.read(command_line(variant.flags), "dspark").error() is None
        assert variant.flags["steps"] == plan[0].flags["steps"]
