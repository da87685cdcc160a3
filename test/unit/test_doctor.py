"""``sgling doctor``: every choice has a reason and a flag, and a model is examined end to end."""

from __future__ import annotations

import json
import shutil

import pytest

from sgling.bench import round_command
from sgling.bench.depth_grid import make_point
from sgling.doctor import advised, main, section, warnings_section
from sgling.srt.config.acceptance import Acceptance
from sgling.srt.config.choices import explain_choices
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.srt.config.server_args import ServerArgs


def choices(**given) -> dict[str, tuple[str, str, str]]:
    args = ServerArgs(**{"device": "cpu", **given})
    return {choice.name: tuple(choice[1:]) for choice in explain_choices(args, args.resolved())}


def test_every_choice_has_a_value_a_reason_and_a_flag():
    known = ServerArgs.__dataclass_fields__
    for name, (value, reason, flag) in choices().items():
        assert value and reason, name
        assert flag.split()[0].removeprefix("--").replace("-", "_") in known, flag


def test_what_was_given_is_not_claimed_as_a_choice():
    assert choices(page_size=16)["page_size"] == ("16", "as given", "--page-size")
    assert choices()["page_size"][1] != "as given"
    assert choices()["speculation"][1] == "the embedded model ships a trained drafter"
    assert choices(speculative_algorithm="none")["speculation"][:2] == ("off", "as given")
    assert choices(speculative_depth="auto")["draft depth"][0] == "auto, at most 7"


def test_refusals_and_notices_are_listed():
    info = {
        "internal_states": [{"refused_fast_paths": {"moe.grouped": "odd rows"}}],
        "notices": ["--x accepted without effect"],
        "needs_cpu_seq_lens": True,
        "pinning_backends": ["FlashInferMLABackend"],
        "ignored_tensors": ["junk"],
    }
    text = warnings_section(info)
    assert all(part in text for part in ("moe.grouped: odd rows", "--x accepted", "FlashInferMLABackend needs", "junk"))
    assert section("Empty", []) == "Empty\n  none"


@pytest.mark.parametrize(
    ("algorithm", "width", "flag"),
    [
        ("NEXTN", 4, "--speculative-num-steps 3"),
        ("DSPARK", 9, "--speculative-dspark-block-size 8"),
        ("DSPARK", 1, "--speculative-algorithm none"),
    ],
)
def test_advice_is_a_flag_that_the_algorithm_obeys(algorithm, width, flag):
    assert advised(make_point(1, width, [(2.0, float(width))]), algorithm) == flag


@pytest.fixture(scope="module")
def random_pico(tmp_path_factory):
    """The embedded model's files without its weights, so that floors may be written beside them."""
    directory = tmp_path_factory.mktemp("pico")
    for path in (ASSETS_DIR / "ling3-pico").glob("*"):
        if path.is_file() and path.suffix != ".safetensors" and path.name != "acceptance.json":
            shutil.copy(path, directory)
    return directory


def test_a_model_is_examined_and_its_floor_recorded(random_pico, capsys, monkeypatch):
    for module in ("sgling.doctor", "sgling.srt.managers.acceptance_smoke"):
        monkeypatch.setattr(f"{module}.MAX_NEW_TOKENS", 6)
    monkeypatch.setattr("sgling.doctor._FLOOR_PROMPTS", 1)
    argv = f"{random_pico} --load-format dummy --speculative-algorithm NEXTN --speculative-num-steps 1"
    assert main([*argv.split(), "--record-floor"]) == 0
    shown = capsys.readouterr().out
    for title in ("Machine", "Choices", "Model", "Memory plan", "Speculation on this machine", "Refusals and notices"):
        assert f"\n{title}" in f"\n{shown}"
    assert "break-even accept length of width 2: " in shown
    assert list(json.loads((random_pico / "acceptance.json").read_text())["accept_lengths"]) == ["NEXTN-2"]
    assert main([*argv.split(), "--speculative-depth", "auto"]) == 0
    shown = capsys.readouterr().out
    assert "auto, at most 1" in shown and "break-even accept length of width 2" in shown
    Acceptance(("a b c",), {"NEXTN-2": 9.0}).write(random_pico)
    assert main(argv.split()) == 1
    assert "FAILED, the drafter accepts too little" in capsys.readouterr().out


def test_static_loads_nothing(random_pico, capsys):
    assert main([str(random_pico), "--static"]) == 0
    assert "Memory plan" not in capsys.readouterr().out


def test_a_missing_model_is_an_error_after_what_is_known(capsys):
    assert main(["/no/such/model"]) == 1
    shown = capsys.readouterr()
    assert "Machine" in shown.out and "not found" in shown.err


def test_bench_round_says_why_it_cannot_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(round_command, "SCRIPT", tmp_path / "round.py")
    assert round_command.main([]) == 1
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "round.py").write_text("print('ran')")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert round_command.main([]) == 1
    assert "no GPU is visible" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert round_command.main(["--quick"]) == 0
    assert capsys.readouterr().out == "ran\n"
