"""Two gloo ranks give the tokens of one with a DSPARK drafter, and hold half of what is sharded."""

from __future__ import annotations

import json

import pytest
import torch
import torch.multiprocessing as mp

from model.tiny_drafter import MLA, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.model_loader.draft_inventory import draft_weight_bytes
from spec.harness import Harness
from spec.test_tensor_parallel import expected_bytes, free_port
from spec.tp_rank import TP, rank_main, requests

CASES = {
    "dense": ({}, {}, "static"),
    "mla": ({**MLA, "markov_head_type": "rnn"}, {}, "static"),
    "gated, rejection": ({"markov_head_type": "gated"}, {"speculative_use_rejection_sampling": True}, "static"),
    "scheduled": ({}, {}, "compact"),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_tokens_of_one(tmp_path, monkeypatch, name):
    overrides, kwargs, mode = CASES[name]
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", mode)
    target = write_tiny_checkpoint(tmp_path / "model", seed=5)
    drafter = write_tiny_drafter(tmp_path / "drafter", block_size=6, **overrides)
    rates = tmp_path / "sps.json"
    rates.write_text(json.dumps({"sample_batch_tokens": [1, 8, 16], "sample_steps_per_sec": [100, 60, 30]}))
    kwargs = {
        "speculative_algorithm": "DSPARK",
        "speculative_draft_model_path": str(drafter),
        "speculative_dspark_sps_table_path": str(rates),
        **kwargs,
    }
    alone = Harness(target, **kwargs).run(*requests())
    mp.spawn(rank_main, (free_port(), str(target), kwargs, str(tmp_path)), nprocs=TP)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(TP)]
    assert ranks[0]["ids"] == {rid: outcome.ids for rid, outcome in alone.items()}
    held = expected_bytes(target, False) + draft_weight_bytes(DSparkConfig.from_dir(drafter), TP, torch.float32)
    assert [rank["bytes"] for rank in ranks] == [held] * TP
