"""``sgling eval drafters``: a real run of NEXTN beside an untrained drafter, and the comparison on made-up figures."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from sgling.bench.evals import drafters
from sgling.cli import main
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.train_draft_args import TrainDraftArgs
from sgling.training.draft.drafter import initial_tensors
from sgling.training.draft.shape import drafter_config
from sgling.training.draft.text_format import TextFormat


def write_untrained(folder: Path) -> Path:
    """A drafter of the embedded model with first weights."""
    raw = drafter_config(TrainDraftArgs(layers=1, mlp=32, block_size=3, markov_rank=4), TextFormat("ling3-pico"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = initial_tensors(DSparkConfig.from_dict(raw), 0)
    save_file({name: value.to(torch.bfloat16) for name, value in tensors.items()}, str(folder / "model.safetensors"))
    return folder


def test_real_run_measures_both_and_reports_who_wins(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drafters, "SCENARIOS", drafters.JUDGED)
    folder = write_untrained(tmp_path / "untrained")
    line = f"eval drafters --drafters {folder} --num-questions 1 --widths 2 4 --max-new-tokens 10 --disable-tqdm"
    assert main([*line.split(), "--json", str(tmp_path / "report.json")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["drafters"]) == ["NEXTN", "untrained"]
    assert list(report["drafters"]["NEXTN"]) == ["2", "4"] and list(report["drafters"]["untrained"]) == ["all"]
    for widths in report["drafters"].values():
        for width, entry in widths.items():
            for found in entry.values():
                assert 1 <= found["accept_length"] <= (4 if width == "all" else int(width))
                product = found["tpot_ms"] * found["accept_length"]
                assert abs(found["tpot_x_accept_ms"] - product) <= 0.01 * product
    assert len(report["drafters"]["untrained"]["all"]["coding"]["acceptance_by_position"]) == 3
    assert "beats NEXTN's best accept length in 0 of 4 judged scenarios" in capsys.readouterr().out
    assert main([*line.split(), "--report-only"]) == 0


def figures(**lengths: float) -> dict:
    return {name: {"accept_length": lengths.get(name, 1.0)} for name in drafters.SCENARIOS}


def test_comparison_takes_nextns_best_width_of_each_scenario():
    measured = {
        "NEXTN": {"4": figures(coding=3.5, zh_chat=3.0), "8": figures(coding=3.0, zh_chat=5.0)},
        "drafter": {"all": figures(coding=3.6, zh_chat=4.9, long_report=1.5)},
    }
    found = drafters.compare(measured)["drafter"]
    assert found["coding"] == {"accept_length": 3.6, "nextn_best": 3.5, "nextn_width": "4", "wins": True}
    assert (found["zh_chat"]["nextn_width"], found["zh_chat"]["wins"]) == ("8", False)
    assert drafters.wins(found) == 2


def test_two_drafters_of_one_name_are_refused(capsys):
    """The second would replace the first's figures."""
    assert main(["eval", "drafters", "--drafters", "b8/drafter", "b16/drafter", "--disable-tqdm"]) == 1
    assert "two drafters are called 'drafter'" in capsys.readouterr().err


def test_a_drafter_that_is_nowhere_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(drafters, "open_subject", None)
    assert main(["eval", "drafters", "--drafters", str(tmp_path / "gone")]) == 1
    assert f"model '{tmp_path / 'gone'}' not found" in capsys.readouterr().err


def test_live_server_is_refused(capsys):
    try:
        main(["eval", "drafters", "--port", "1"])
    except SystemExit as stopped:
        assert stopped.code == 2
    assert "engines are started here" in capsys.readouterr().err
