"""Two gloo ranks give the single rank's tokens, through the whole scheduler, and hold half of every sharded byte."""

from __future__ import annotations

import json
import socket

import pytest
import torch.multiprocessing as mp

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.model_loader.footprint import is_replicated
from sgling.srt.model_loader.inventory import expected_tensors
from spec.harness import Harness
from spec.tp_rank import FREE_BYTES, TP, rank_main, requests


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"speculative_algorithm": "none"},
        {"speculative_num_steps": 3},
        {"speculative_num_steps": 3, "speculative_depth": "auto"},
    ],
    ids=["plain", "nextn", "auto depth"],
)
def test_two_ranks_give_the_tokens_of_one(tmp_path, kwargs):
    model_dir = write_tiny_checkpoint(tmp_path / "model", seed=5)
    alone = Harness(model_dir, **kwargs).run(*requests())
    mp.spawn(rank_main, (free_port(), str(model_dir), kwargs, str(tmp_path)), nprocs=TP)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(TP)]
    assert ranks[0]["ids"] == {rid: outcome.ids for rid, outcome in alone.items()}
    assert_one_plan([rank["plan"] for rank in ranks])
    assert ranks[0]["logprobs"] == pytest.approx([entry.logprob for entry in alone["g"].logprobs], abs=1e-4)
    assert [rank["bytes"] for rank in ranks] == [expected_bytes(model_dir, "speculative_num_steps" in kwargs)] * TP


def assert_one_plan(plans: list[dict]) -> None:
    """Ranks with unequal free memory share the smallest one's plan: pools decide who waits and who is retracted."""
    assert plans[0] == plans[1]
    assert plans[0]["budget_bytes"] < min(FREE_BYTES)
    assert plans[0]["max_total_tokens"] < plans[0]["max_running_requests"] * plans[0]["row_width"]


def expected_bytes(model_dir, with_nextn: bool) -> int:
    """fp32 bytes of one rank from the inventory: 1/TP of what is sharded, all of what is replicated."""
    specs = expected_tensors(ModelConfig.from_dir(model_dir), with_nextn)
    return sum(4 * spec.numel // (1 if is_replicated(name) else TP) for name, spec in specs.items())
