"""The embedded model keeps its contract: the short form of the packaged file, on a real engine."""

from __future__ import annotations

import json

from sgling import cli

SCENARIOS = ("coding", "tool_calling", "long_report", "zh_chat", "arithmetic")


def test_the_embedded_model_keeps_its_contract(tmp_path, capsys):
    out = tmp_path / "report.json"
    status = cli.main(["gate", "contract", "--short", "--disable-tqdm", "--json", str(out)])
    shown = capsys.readouterr()
    assert status == 0, shown.out + shown.err
    report = json.loads(out.read_text())
    assert report["failed"] == []
    places = {row["place"] for row in report["rows"]}
    assert places == {*(f"{name}/c1/cold" for name in SCENARIOS), "rollback", "server"}
