"""The published drafter at one rank's shape: its config fits, its random weights load, and a cut-down pair serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model.published import FLASH
from sgling.srt.config.dspark_config import DenseShape, DSparkConfig
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.model_loader.draft_inventory import draft_copy_bytes, draft_weight_bytes
from spec.harness import Harness, random_prompt, request
from spec.test_dspark_checkpoint import PUBLIC_LING

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"
SMALL = {  # both models: sizes that do not say which layers there are and what they tap
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
SMALL_TARGET = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


@pytest.fixture
def rank_shape(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import rank_shape

    return rank_shape


def test_the_benchmarks_drafter_is_the_published_one():
    published = json.loads((BENCHMARK / "configs" / "ling3-flash-dspark.json").read_text())
    assert DSparkConfig.from_dict(published) == DSparkConfig.from_dict(PUBLIC_LING)


@pytest.mark.parametrize("block", [8, 16])
def test_a_rank_holds_a_quarter_and_fits_its_target(rank_shape, block):
    target = rank_shape.rank_config(4, None)
    drafter = DSparkConfig.from_dict(rank_shape.rank_drafter(target, 4, block))
    drafter.check_target(ModelConfig.from_dict(target), 1)
    assert drafter.attention == DenseShape(8, 8, 128) and drafter.block_size == block
    assert (drafter.intermediate_size, drafter.vocab_size, drafter.markov_rank) == (1536, 39296, 256)
    assert drafter.target_layer_ids == (1, 11, 23, 29, 35)


def test_smoke_runs_tap_layers_that_exist(rank_shape):
    target = rank_shape.rank_config(4, 12)
    drafter = DSparkConfig.from_dict(rank_shape.rank_drafter(target, 4, 8))
    drafter.check_target(ModelConfig.from_dict(target), 1)
    assert len(drafter.target_layer_ids) == 5


@pytest.mark.parametrize("block", [8, 16])
def test_the_published_pair_serves_at_a_small_size(tmp_path, block):
    """All 42 layers with the published taps, dummy weights, drafter in the model's own folder."""
    (tmp_path / "config.json").write_text(json.dumps({**FLASH, **SMALL, **SMALL_TARGET}))
    (tmp_path / "dspark").mkdir()
    small = {**PUBLIC_LING, **SMALL, "mask_token_id": 511, "markov_rank": 32, "block_size": block}
    (tmp_path / "dspark" / "config.json").write_text(json.dumps(small))
    item = request("r", random_prompt(9, 1), max_new_tokens=6)
    plain = Harness(tmp_path, load_format="dummy", speculative_algorithm="none").run(item)["r"]
    harness = Harness(tmp_path, load_format="dummy", speculative_algorithm="DSPARK")
    assert harness.core.runner.model.tap_layers == (1, 11, 23, 29, 35)
    assert harness.run(item)["r"].ids == plain.ids


def test_the_second_copy_of_keys_and_values_is_counted():
    config = DSparkConfig.from_dict(PUBLIC_LING)
    kv = 5 * 2 * 32 * 128 * 2560 * 2
    assert draft_copy_bytes(config, 1, torch.bfloat16) == kv
    assert draft_copy_bytes(config, 4, torch.bfloat16) == kv // 4
    assert draft_copy_bytes(config, 1, torch.bfloat16) < draft_weight_bytes(config, 1, torch.bfloat16) // 4
