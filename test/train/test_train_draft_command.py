"""The command around a run: acceptance check, floors beside a drafter, embedded drafters by name, exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sgling
from sgling import train_draft
from sgling.cli import main
from sgling.srt.config import model_path
from sgling.srt.config.acceptance import read_acceptance
from sgling.srt.config.draft_model import acceptance_dir
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs
from sgling.training.draft.run import train
from train.miniature import write_target
from train.test_draft_runs import options


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """(target, drafter) of a run of two steps: it drafts nonsense."""
    target = write_target(tmp_path_factory.mktemp("target"))
    return target, train("dspark", options(target, tmp_path_factory.mktemp("run"), steps=2))


def test_drafter_that_is_not_accepted_fails_the_check(trained):
    target, folder = trained
    with pytest.raises(RuntimeError, match="not accepted: accept length 1.0"):
        train_draft.acceptance_check("dspark", str(target), folder)


def serves(accept_length: float):
    """An engine whose answers report an accept length."""

    class Engine:
        def __init__(self, **flags):
            flags = {name: value for name, value in flags.items() if name != "log_level"}
            args = ServerArgs.from_kwargs(**flags)
            from sgling.srt.config.draft_model import complete_args

            self.server_args = complete_args(args)

        def generate(self, prompts, params):
            facts = {"spec_verify_ct": 100, "spec_num_correct_drafts": round(100 * (accept_length - 1))}
            return [{"meta_info": facts} for _ in prompts]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    return Engine


def test_floor_is_recorded_beside_the_drafter_and_read_from_there(trained, monkeypatch):
    target, folder = trained
    monkeypatch.setattr(sgling, "Engine", serves(3.5), raising=False)
    result, path = train_draft.acceptance_check("dspark", str(target), folder)
    assert result.accept_length == 3.5 and path == folder / "acceptance.json"
    assert read_acceptance(folder).accept_lengths == {"DSPARK-5": 3.5}
    flags = {"model_path": str(target), "speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(folder)}
    assert acceptance_dir(ServerArgs.from_kwargs(**flags), target) == folder
    assert acceptance_dir(ServerArgs.from_kwargs(model_path=str(target)), target) == target
    path.unlink()
    assert acceptance_dir(ServerArgs.from_kwargs(**flags), target) == target


def test_embedded_drafters_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(model_path, "ASSETS_DIR", tmp_path)
    for name in model_path.EMBEDDED_DRAFTERS:
        with pytest.raises(ServerArgsError, match=name):
            model_path.resolve_model_path(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        assert model_path.resolve_model_path(name) == tmp_path / name


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--target", "nowhere-at-all"], 1, "nowhere-at-all"),
        (["--steps", "1", "--seconds", "1"], 2, "exclude each other"),
        (["--split-serve", "1"], 2, "N:M"),
        (["--rows", "3", "--batch-rows", "4"], 2, "multiple of --rows"),
        (["--fresh", "--pool", "x"], 2, "--fresh"),
        (["--given-share", "2"], 2, "--given-share"),
        (["--anchors", "0"], 2, "--anchors must be positive"),
        (["--steps", "-1"], 2, "--steps must not be negative"),
        (["--regenerate", "-1"], 2, "--regenerate must not be negative"),
        (["--temperatures", "0", "-1"], 2, "--temperatures must not be negative"),
        (["--chain", "3"], 2, "--chain: not for dspark"),
    ],
)
def test_wrong_flags(argv, status, message, capsys, tmp_path):
    argv = ["train-draft", "dspark", "--output", str(tmp_path), *argv]
    if status == 2:
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
    else:
        assert main(argv) == status
    assert message in capsys.readouterr().err


def test_shape_and_losses_of_a_block_drafter_are_refused_for_the_nextn_layer(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["train-draft", "nextn", "--output", str(tmp_path), "--block-size", "16", "--l1", "0.5", "--chain", "3"])
    assert "--block-size, --l1: not for nextn" in capsys.readouterr().err


def test_command_trains_and_names_the_folder(trained, tmp_path, capsys, monkeypatch):
    target, _ = trained
    monkeypatch.setattr(sgling, "Engine", serves(2.0), raising=False)
    argv = (
        f"train-draft dspark --target {target} --output {tmp_path} --row 192 --rows 2 --anchors 8 --slots 4 --steps 2"
    )
    argv += " --max-new-tokens 12 --layers 1 --mlp 16 --eval-prompts 1 --regenerate 5 --device cpu --disable-tqdm"
    assert main(argv.split()) == 0
    shown = capsys.readouterr().out
    assert "supervised tokens per sample" in shown and "accept length 2.00 (DSPARK-9)" in shown
    assert shown.strip().endswith(f"drafter: {tmp_path / 'drafter'}")
    assert json.loads((tmp_path / "drafter" / "acceptance.json").read_text())["accept_lengths"] == {"DSPARK-9": 2.0}
