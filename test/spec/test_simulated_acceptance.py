"""``SGLANG_SIMULATE_ACC_LEN``: the mean is what was asked for, padded rows accept nothing, the bonus follows."""

from __future__ import annotations

import pytest
import torch

from sgling.srt.speculative.simulate import checked_mean
from sgling_kernel.verdict import Verdict, simulated_verdict


def verdict(rows: int, width: int) -> Verdict:
    accept = torch.ones(rows, dtype=torch.int64)
    accept[0] = 0  # a padded row
    return Verdict(torch.arange(rows * width).view(rows, width), accept, torch.zeros(rows, dtype=torch.int64))


@pytest.mark.parametrize("mean", [1.0, 3.45, 6.0, 9.0])
def test_mean_bonus_and_padding(mean):
    rows, width = 4001, 6
    result = simulated_verdict(verdict(rows, width), torch.arange(rows), checked_mean(mean))
    lengths = result.accept_lens[1:]
    assert result.accept_lens[0] == 0
    assert abs(lengths.double().mean() - min(mean, width)) < 0.03
    assert set(lengths.tolist()) <= {int(min(mean, width)), min(int(mean) + 1, width)}
    assert torch.equal(result.bonus[1:], result.target_ids[1:].gather(1, lengths[:, None] - 1)[:, 0])


def test_less_than_the_bonus_is_refused():
    with pytest.raises(ValueError, match="0.5"):
        checked_mean(0.5)
