"""The memory plan: sizes are arithmetic, and what cannot fit is refused before anything is loaded, with numbers."""

from __future__ import annotations

import pytest
import torch

from model.published import FLASH, PICO
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.model_executor.memory_plan import (
    MemoryPlanError,
    kv_bytes_per_token,
    make_plan,
    state_bytes_per_slot,
)
from sgling.srt.model_loader.footprint import rank_weight_bytes

FLASH_CONFIG, PICO_CONFIG = ModelConfig.from_dict(FLASH), ModelConfig.from_dict(PICO)
GB = 10**9


def args(**kwargs) -> ServerArgs:
    return ServerArgs.from_kwargs(**{"device": "cpu", "speculative_algorithm": "NEXTN", **kwargs})


def test_kv_bytes_of_flash_are_the_published_ones():
    assert kv_bytes_per_token(FLASH_CONFIG, args(speculative_algorithm="none", dtype="bfloat16")) == 8064
    assert kv_bytes_per_token(FLASH_CONFIG, args(dtype="bfloat16")) == 9216


def test_state_bytes_of_flash_are_the_published_ones():
    plain = args(speculative_algorithm="none")
    assert state_bytes_per_slot(FLASH_CONFIG, plain, torch.bfloat16) == 75_980_800
    four = args(speculative_algorithm="none", tp_size=4)
    assert state_bytes_per_slot(FLASH_CONFIG, four, torch.bfloat16) == 18_995_200


def test_staged_rollback_costs_one_state_per_row_and_replay_far_less():
    plain = state_bytes_per_slot(FLASH_CONFIG, args(speculative_algorithm="none"), torch.bfloat16)
    staged = state_bytes_per_slot(FLASH_CONFIG, args(linear_rollback="staged"), torch.bfloat16)
    replay = state_bytes_per_slot(FLASH_CONFIG, args(linear_rollback="replay"), torch.bfloat16)
    assert staged == plain + 4 * plain
    assert plain < replay < plain + staged // 4


def test_weights_of_flash_on_four_ranks_are_the_published_ones():
    assert rank_weight_bytes(FLASH_CONFIG, 4, torch.bfloat16, with_nextn=False) == pytest.approx(62.3 * GB, rel=0.003)
    nextn = rank_weight_bytes(FLASH_CONFIG, 4, torch.bfloat16, with_nextn=True)
    assert nextn - rank_weight_bytes(FLASH_CONFIG, 4, torch.bfloat16, False) == pytest.approx(1.56 * GB, rel=0.01)


def test_a_model_that_cannot_fit_is_refused_with_the_numbers():
    with pytest.raises(MemoryPlanError, match=r"weights 248\.\d+ GB.*--tp-size"):
        make_plan(FLASH_CONFIG, args(), rank_weight_bytes(FLASH_CONFIG, 1, torch.bfloat16, False), 140 * GB)


def test_asked_tokens_that_do_not_fit_are_refused():
    with pytest.raises(MemoryPlanError, match="--max-total-tokens"):
        make_plan(PICO_CONFIG, args(max_total_tokens=10**9), 50 * 10**6, GB)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pool_is_whole_pages_and_rows_hold_context_and_window(page_size):
    plan = make_plan(PICO_CONFIG, args(page_size=page_size, max_total_tokens=1000), 50 * 10**6, 8 * GB)
    assert plan.max_total_tokens % page_size == 0
    assert 1000 - page_size < plan.max_total_tokens <= 1000
    assert plan.row_width % page_size == 0
    assert plan.row_width >= plan.context_len + 2 * 4


def test_context_beyond_the_model_is_refused():
    with pytest.raises(MemoryPlanError, match="--context-length 20000"):
        make_plan(PICO_CONFIG, args(context_length=20000), 50 * 10**6, 8 * GB)


def test_a_pool_smaller_than_one_window_is_refused():
    with pytest.raises(MemoryPlanError, match="--max-total-tokens 5"):
        make_plan(PICO_CONFIG, args(max_total_tokens=5), 50 * 10**6, 8 * GB)
