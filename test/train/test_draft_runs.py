"""Miniature runs of ``sgling train-draft``: repeatable, resumable after a kill, exported as the server reads them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sgling
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.train_draft_args import TrainDraftArgs
from sgling.srt.model_loader.checkpoint import stored_tensors
from sgling.srt.model_loader.draft_inventory import check_draft_inventory
from sgling.training.draft.ablation import read_plan
from sgling.training.draft.pool import read_pool
from sgling.training.draft.regenerate import Answered
from sgling.training.draft.run import Setup, train
from sgling.training.draft.simulate import hold_out, simulate
from sgling.training.draft.trainer import Trainer
from sgling.training.evaluate import accept_run
from train.miniature import write_target

SMALL = {
    "row": 192,
    "rows": 2,
    "anchors": 12,
    "slots": 6,
    "max_new_tokens": 16,
    "layers": 1,
    "mlp": 24,
    "eval_prompts": 1,
    "eval_every": 4,
    "log_every": 1,
    "block_size": 4,
    "markov_rank": 4,
    "regenerate": 10,
    "device": "cpu",
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def options(target: Path, output: Path, **changes) -> TrainDraftArgs:
    return TrainDraftArgs(target=str(target), output=output, **(SMALL | {"steps": 6} | changes))


def command(args: dict, kind: str = "dspark") -> list[str]:
    line = [sys.executable, "-m", "sgling", "train-draft", kind, "--no-acceptance-check"]
    for name, value in args.items():
        flag = f"--{name.replace('_', '-')}"
        line += [flag] if value is True else [flag, str(value)]
    return line


def environment() -> dict[str, str]:
    paths = [str(Path(sgling.__file__).parents[1]), *sys.path]
    return {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model.safetensors"))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def lines(output: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


@pytest.fixture(scope="module")
def straight(target, tmp_path_factory) -> Path:
    """Output of an uninterrupted run of eight steps."""
    output = tmp_path_factory.mktemp("straight")
    train("dspark", options(target, output, steps=8))
    return output


def test_run_exports_what_the_server_loads_and_says_what_it_did(target, straight, capsys):
    folder = straight / "drafter"
    config = DSparkConfig.from_dir(folder)
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (4, (-1, 0), 6099)
    _, ignored = check_draft_inventory(stored_tensors(folder), config)
    assert ignored == () and all(value.dtype == torch.bfloat16 for value in weights(folder).values())
    report = json.loads((folder / "training.json").read_text())
    assert report["given"] == 0.0 and report["steps"] == 8 and report["simulated"]["accept_length"] >= 1
    assert [line["step"] for line in lines(straight, "train")] == list(range(1, 9))
    assert [line["step"] for line in lines(straight, "simulate")] == [4, 8]


def test_tensorboard_holds_the_same_figures(straight):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(straight / "tensorboard"))
    events.Reload()
    drawn = [event.value for event in events.Scalars("train/ce")]
    assert drawn == pytest.approx([line["ce"] for line in lines(straight, "train")], rel=1e-5)


def test_second_run_gives_the_same_weights_and_another_seed_does_not(target, straight, tmp_path):
    again = train("dspark", options(target, tmp_path / "again", steps=8))
    assert same(weights(again), weights(straight / "drafter"))
    other = train("dspark", options(target, tmp_path / "other", steps=8, seed=1))
    assert not same(weights(other), weights(straight / "drafter"))


def wait_for(condition, process: subprocess.Popen, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.02)


def test_killed_run_goes_on_to_the_same_weights(target, straight, tmp_path):
    flags = SMALL | {"target": target, "output": tmp_path, "save_every": 0, "steps": 8}
    process = subprocess.Popen(
        command(flags), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and len(lines(tmp_path, "train")) >= 3, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"]
    resumed = train("dspark", options(target, tmp_path, steps=8, resume=True))
    assert saved >= 2 and same(weights(resumed), weights(straight / "drafter"))


def test_interrupted_run_saves_before_it_leaves(target, tmp_path, monkeypatch):
    step = Trainer.one_step

    def stop_at_three(self, features, progress):
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, features, progress)

    monkeypatch.setattr(Trainer, "one_step", stop_at_three)
    with pytest.raises(KeyboardInterrupt):
        train("dspark", options(target, tmp_path))
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 3


@pytest.fixture(scope="module")
def learned(target, tmp_path_factory) -> Path:
    """Output of a run on a few greedy answers, long enough to draft them."""
    output = tmp_path_factory.mktemp("learned")
    train("dspark", options(target, output, steps=160, eval_every=160, ce=1.0, temperatures=[0.0], log_every=10))
    return output


def test_what_the_target_writes_is_learned(learned):
    """Drafts of text the target has written become right (a random head allows no sharp distributions)."""
    first, last = (lines(learned, "train")[index] for index in (0, -1))
    assert last["ce"] < 0.95 * first["ce"] and last["hit_1"] > 0.7 and last["hit_4"] > 0.4 > 0.1 > first["hit_1"]


def test_simulated_rounds_are_the_rounds_of_the_engine(target, learned):
    """Conversations of the pool again, served: as many verify steps, as many accepted drafts but for the cut end."""
    folder = learned / "drafter"
    args = options(target, learned, init=folder)
    setup = Setup("dspark", args, "cpu", 0)
    pool = read_pool(learned / "pool.safetensors", setup.text.identity())
    samples = [sample for sample in pool.samples if sample.answer.any()][:5]
    answers = [
        Answered(index, sample.ids.tolist(), int((~sample.answer).sum()), 0.0) for index, sample in enumerate(samples)
    ]
    held_out = hold_out(setup.target, answers, ["pool"] * 5, (2, args.row))
    task = setup.make_task(setup.target)
    flags = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(folder), "log_level": "warning"}
    drafted = 0
    with sgling.Engine(model_path=str(target), **flags) as engine:
        for answered, one in zip(answers, held_out, strict=True):
            count = len(answered.ids) - answered.prompt_length
            params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
            served = engine.generate(input_ids=answered.ids[: answered.prompt_length], sampling_params=params)
            rounds = accept_run(task.hits(one.features, (one.first, one.last)), one.first, one.last, task.width)
            facts = served["meta_info"]
            assert served["output_ids"] == answered.ids[answered.prompt_length :]
            assert facts["spec_verify_ct"] == len(rounds)
            assert 0 <= facts["spec_num_correct_drafts"] - (sum(rounds) - len(rounds)) < task.width
            drafted += sum(rounds) - len(rounds)
    assert drafted > 20


def test_selected_weights_are_the_best_simulated(target, tmp_path, monkeypatch):
    """A run that gets worse exports what it had."""
    values = iter((3.0, 2.0, 1.0))
    seen = []

    def scripted(task, held_out):
        seen.append(task.state())
        return {"accept_length": next(values, 1.0), "scenarios": {}}

    monkeypatch.setattr("sgling.training.draft.trainer.simulate", scripted)
    folder = train("dspark", options(target, tmp_path, steps=12))
    best = {name: value.to(torch.bfloat16) for name, value in seen[0].items()}
    assert len(seen) == 3 and same(weights(folder), best) and not same(weights(folder), seen[2])


def test_pool_of_another_run_and_given_answers(target, straight, tmp_path, caplog):
    train("dspark", options(target, tmp_path / "a", steps=1, pool=[str(straight / "pool.safetensors")]))
    assert "not written by this target" not in caplog.text
    train("dspark", options(target, tmp_path / "b", steps=1, regenerate=0, given=6))
    assert "100.0 % of the supervised tokens were not written by this target" in caplog.text
    other = write_target(tmp_path / "other", seed=1)
    train("dspark", options(other, tmp_path / "c", steps=1, pool=[str(straight / "pool.safetensors")]))
    assert json.loads((tmp_path / "c" / "drafter" / "training.json").read_text())["given"] == 1.0


def test_continued_drafter_keeps_its_shape_and_starts_where_it_was(target, straight, tmp_path):
    folder = train("dspark", options(target, tmp_path, steps=0, init=straight / "drafter", layers=3))
    assert same(weights(folder), weights(straight / "drafter"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask_token": "<|nothing|>"}, ServerArgsError, "--mask-token"),
        ({"taps": [0, 1]}, ModelConfigError, "last usable layer is 0"),
        ({"kv_heads": 3}, ModelConfigError, "num_key_value_heads"),
        ({"regenerate": 0}, ServerArgsError, "no data"),
        ({"resume": True}, ServerArgsError, "no checkpoint"),
        ({"target": "nowhere"}, ServerArgsError, "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(target, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        train("dspark", options(changes.pop("target", target), tmp_path, **changes))


@pytest.mark.parametrize("kept", [0, 1000])
def test_a_damaged_checkpoint_is_named(target, tmp_path, kept):
    """The reader of the file said what was wrong, but not with which file."""
    train("dspark", options(target, tmp_path, steps=1))
    checkpoint = tmp_path / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:kept])
    with pytest.raises(ServerArgsError, match=r"--resume: .*checkpoint\.pt is damaged"):
        train("dspark", options(target, tmp_path, steps=2, resume=True))


def test_nextn_layer_is_trained_and_the_trunk_stays(target, tmp_path):
    flags = {"steps": 4, "eval_every": 2, "chain": 3, "row": 96}
    folder = train("nextn", options(target, tmp_path, **flags))
    before, after = {}, {}
    for found, directory in ((before, target), (after, folder)):
        for file in directory.glob("*.safetensors"):
            found.update(load_file(str(file)))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and moved and all(name.startswith("model.layers.2.") for name in moved)
    assert (folder / "tokenizer.json").is_file() and len(lines(tmp_path, "simulate")) == 2
    with sgling.Engine(model_path=str(folder), speculative_algorithm="NEXTN", log_level="warning") as engine:
        answer = engine.generate(input_ids=[5, 6, 7], sampling_params={"temperature": 0, "max_new_tokens": 8})
    assert answer["meta_info"]["completion_tokens"] == 8


class Scripted:
    """A drafter whose drafts are right up to a given depth."""

    width = 4

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def hits(self, features, span):
        found = torch.zeros(3, 40, dtype=torch.bool)
        found[: self.depth] = True
        return found


def test_simulated_accept_length_counts_bonus_tokens():
    from sgling.training.draft.simulate import HeldOut

    held = [HeldOut("a", None, 10, 34), HeldOut("b", None, 10, 34)]
    report = simulate(Scripted(1), held)
    assert report["accept_length"] == 2.0
    assert report["scenarios"]["a"]["acceptance_by_position"] == [1.0, 0.0, None]
    assert simulate(Scripted(3), held)["accept_length"] == 4.0


def test_plan_of_an_ablation_is_checked(tmp_path):
    from sgling.srt.config.train_draft_args import AblateArgs

    path = tmp_path / "plan.yaml"
    path.write_text("base: {seconds: 30, layers: 2}\nvariants:\n- {name: a}\n- {name: b, layers: 3}\n")
    plan = read_plan(path, AblateArgs(plan=path))
    assert [(variant.name, variant.flags["layers"]) for variant in plan] == [("a", 2), ("b", 3)]
    assert read_plan(path, AblateArgs(plan=path, seconds=5.0, only=["b"]))[0].flags["seconds"] == 5.0
    path.write_text("base: {steps: 30}\nvariants:\n- {name: a}\n")
    assert "steps" not in read_plan(path, AblateArgs(plan=path, seconds=5.0))[0].flags
    for text, message in (
        ("variants: [{name: a, seconds: 1, steps: 2}]", "exclude each other"),
        ("variants: [{name: a, steps: 2, rows: many}]", "another type"),
        ("variants: [{name: a, steps: 2, layers: 0}]", "--layers must be positive"),
        ("variants: [{name: a, steps: 2, chain: 3}]", "--chain: not for dspark"),
        ("variants: 3", "list of variants"),
        ("variants: [{layers: 2}]", "with a name"),
        ("variants: [{name: a, seconds: 1, wings: 2}]", "'wings'"),
        ("variants: [{name: a, seconds: 61}]", "seconds"),
        ("variants: [{name: a, seconds: 1}, {name: a, seconds: 1}]", "differ"),
        ("variants: [{name: a, seconds: 1, output: x}]", "'output'"),
    ):
        path.write_text(text)
        with pytest.raises(ServerArgsError, match=message):
            read_plan(path, AblateArgs(plan=path))


def test_interrupted_nextn_run_goes_on_to_the_same_weights(target, tmp_path, monkeypatch):
    flags = {"steps": 4, "eval_every": 2, "chain": 2, "row": 96, "regenerate": 6}
    straight = train("nextn", options(target, tmp_path / "straight", **flags))
    step = Trainer.one_step

    def stop_at_three(self, features, progress):
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, features, progress)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "one_step", stop_at_three)
        train("nextn", options(target, tmp_path / "cut", **flags))
    resumed = train("nextn", options(target, tmp_path / "cut", resume=True, **flags))
    for file in sorted(straight.glob("*.safetensors")):
        assert same(load_file(str(file)), load_file(str(resumed / file.name)))
