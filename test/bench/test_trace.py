"""``sgling trace``: recorded rounds, a picture of its own, and predictions beside the measurements."""

from __future__ import annotations

import json

from sgling.bench.trace import main
from sgling.srt.observability.round_picture import Calibration, figures_text, round_page
from sgling.srt.observability.rounds import LAUNCH, find_rounds
from sgling.srt.observability.step_trace import DEVICE, HOST, Span

KIND = {"kind": "decode", "requests": 1, "width": 4}
SPANS = [
    span
    for start in (0, 1_000_000)
    for span in (
        Span(LAUNCH, HOST, start, start + 900_000, KIND),
        Span("verify", DEVICE, start + 100_000, start + 800_000, {}),
        Span("L0 <KDA>", DEVICE, start + 200_000, start + 300_000, {}),
    )
]


def test_the_page_holds_lanes_seams_nodes_and_predictions():
    page = round_page(find_rounds(SPANS), {"model": "m&m", "device": "cuda"}, Calibration(1.0, 1.1), {"verify": 500.0})
    assert "m&amp;m" in page and "L0 &lt;KDA&gt;" in page and "<KDA>" not in page
    assert page.count("seam: ") == 2  # before the verify and behind it
    assert "<td>600.0</td><td>500.0</td><td>+100.0</td>" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_calibration_is_printed():
    lines = figures_text(find_rounds(SPANS), Calibration(1.0, 1.1))
    assert "recording adds +10.0%" in lines[-1]
    assert "device idle 30.0%" in lines[1]
    assert "is noise" in figures_text(find_rounds(SPANS), Calibration(1.1, 1.0))[-1]


def test_an_engine_is_traced(tmp_path, capsys):
    predicted = tmp_path / "predicted.json"
    predicted.write_text(json.dumps({"verify": 1.0}))
    argv = f"ling3-pico --load-format dummy --output-len 8 --repeats 1 --output-dir {tmp_path} --predicted {predicted}"
    assert main(argv.split()) == 0
    assert "calibration: " in capsys.readouterr().out
    assert list(tmp_path.glob("*.trace.json.gz"))
    page = (tmp_path / "round.html").read_text()
    assert "NEXTN MLA" in page and "predicted us" in page


def test_errors_are_said(tmp_path, capsys):
    assert main(["/no/such/model", "--output-dir", str(tmp_path)]) == 1
    assert "not found" in capsys.readouterr().err
