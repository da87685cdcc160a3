"""SplitServe on the CPU: the same weights as the one-process loop, and a clean end when either side dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.train_draft_args import TrainDraftArgs
from sgling.training.draft.run import train
from sgling.training.draft.split_serve import check_devices, train_split
from train.miniature import write_target
from train.test_draft_runs import SMALL, command, environment, lines, same, wait_for, weights

FRESH = SMALL | {"fresh_conversations": 5, "steps": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def test_one_to_one_trains_the_same_weights_as_one_process(target, tmp_path):
    one = train("dspark", TrainDraftArgs(target=str(target), output=tmp_path / "one", fresh=True, **FRESH))
    split = train_split(
        "dspark", TrainDraftArgs(target=str(target), output=tmp_path / "split", split_serve="1:1", **FRESH)
    )
    assert same(weights(one), weights(split))
    journal = [json.loads(line) for line in (tmp_path / "split" / "engine-0.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in journal[:4]] == [0, 1, 2, 3]
    assert all(line["answer_tokens"] > 0 for line in journal) and len(journal) <= 4 + 2 + 1


def test_two_trainers_and_two_engines(target, tmp_path):
    """Every batch is trained on once; the step is the mean over both trainers' batches."""
    args = TrainDraftArgs(target=str(target), output=tmp_path, split_serve="2:2", **(FRESH | {"steps": 2}))
    assert (train_split("dspark", args) / "model.safetensors").is_file()
    batches = [json.loads(line)["batch"] for rank in range(2) for line in (tmp_path / f"engine-{rank}.jsonl").open()]
    assert set(range(4)) <= set(batches) and len(batches) == len(set(batches))


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("victim", ["engine rank 0", "trainer rank 0"])
def test_either_side_dies(target, tmp_path, victim):
    flags = FRESH | {"target": target, "output": tmp_path, "split_serve": "1:1", "steps": 100_000, "save_every": 0}
    process = subprocess.Popen(
        command(flags), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and len(lines(tmp_path, "train")) >= 2, process)
    ranks = json.loads((tmp_path / "ranks.json").read_text())
    os.kill(ranks[victim], signal.SIGKILL)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1 and f"{victim} died" in message
    until = time.monotonic() + 5
    while any(is_alive(pid) for pid in ranks.values()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in ranks.values())
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"]
    assert saved >= 1
    if victim.startswith("engine"):
        assert saved == lines(tmp_path, "train")[-1]["step"]  # the trainer saved what it had before it left


@pytest.mark.parametrize("text", ["1", "1:0", "a:1", "1:1:1"])
def test_split_is_read_or_refused(text):
    with pytest.raises(ServerArgsError, match="N:M"):
        TrainDraftArgs(split_serve=text).split()


def test_split_of_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = TrainDraftArgs(split_serve="1:1", device="cuda")
    with pytest.raises(ServerArgsError, match="needs 2 GPUs, there are 1"):
        check_devices(args, args.split())
