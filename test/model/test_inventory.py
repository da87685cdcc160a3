"""The tensor list of a config adds up to the published parameter counts to the last digit."""

from __future__ import annotations

import pytest
import torch

from model.published import FLASH, PICO, TINY
from model.tiny_model import tiny_config
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.model_loader.footprint import is_replicated, rank_weight_bytes
from sgling.srt.model_loader.inventory import expected_tensors, layer_tensors


def _totals(raw, with_nextn):
    specs = expected_tensors(ModelConfig.from_dict(raw), with_nextn).values()
    return sum(spec.numel for spec in specs), sum(spec.numel for spec in specs if spec.dtype == "F32")


def test_flash_totals():
    assert _totals(FLASH, with_nextn=True) == (127_486_405_600, 165_472)
    assert _totals(FLASH, with_nextn=False)[0] == 124_414_211_552


def test_tiny_totals():
    assert _totals(TINY, with_nextn=False) == (7_893_392_800, 40_096)


def test_flash_per_layer_and_family_counts():
    config = ModelConfig.from_dict(FLASH)
    attention = [
        sum(spec.numel for name, spec in layer_tensors(config, layer).items() if ".attention." in name)
        for layer in (0, 5, 42)
    ]
    assert attention == [63_049_888, 31_965_696, 31_965_696]
    names = expected_tensors(config, with_nextn=True)
    counts = {
        "input_layernorm.weight": 43,
        "post_attention_layernorm.weight": 43,
        "mlp.gate.weight": 41,
        "A_log": 35,
        "kv_b_proj.weight": 8,
    }
    assert {leaf: sum(name.endswith(leaf) for name in names) for leaf in counts} == counts
    routed = {name.rsplit(".", 2)[0] for name in names if ".experts." in name}
    assert len(routed) == 41 * 512


def test_tied_head_is_not_expected():
    config = ModelConfig.from_dict(tiny_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in expected_tensors(config, with_nextn=True)


def test_pico_size():
    total, _ = _totals(PICO, with_nextn=True)
    assert total == 13_282_136


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_flash_rank_bytes(tp_size):
    """Sharded families split exactly; the published residency is 248.8 + 6.14 GB at TP1 and 62.3 + 1.56 GB at TP4."""
    config = ModelConfig.from_dict(FLASH)
    specs = expected_tensors(config, with_nextn=True)
    sharded = sum(spec.numel for name, spec in specs.items() if not is_replicated(name))
    assert sharded % tp_size == 0
    gigabytes = rank_weight_bytes(config, tp_size, torch.bfloat16, with_nextn=True) / 1e9
    assert gigabytes == pytest.approx({1: 254.97, 2: 127.6, 4: 63.9}[tp_size], rel=1e-3)
