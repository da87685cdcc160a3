"""A forced accept length for benchmarks (``SGLANG_SIMULATE_ACC_LEN``): the work is real, the verdict is not."""

from __future__ import annotations

import torch

from sgling_kernel.noise import uniform_noise
from sgling_kernel.verdict import Verdict

_SEED = 20_26  # any constant: runs of the same length sequence draw the same accept lengths


def with_simulated_length(verdict: Verdict, seq_lens: torch.Tensor, mean: float) -> Verdict:
    """Replace accept lengths by floor(mean) or one more, so that their mean is ``mean``; at most W, padded rows stay 0.

    Args:
        verdict: the true verdict; its target ids are kept, the bonus is the last one that now counts.
        seq_lens: int64 [bs], committed lengths before the step; they key the draw.
        mean: wanted accept length, bonus included, >= 1.
    """
    if mean < 1:
        raise ValueError(f"simulated accept length {mean}: at least the bonus token is accepted, so it is >= 1")
    width = verdict.target_ids.shape[1]
    draw = uniform_noise(torch.full_like(seq_lens, _SEED), seq_lens, 0, 1)[:, 0]
    length = (int(mean) + (draw < mean - int(mean)).long()).clamp_max(width)
    length = torch.where(verdict.accept_lens > 0, length, 0)
    bonus = verdict.target_ids.gather(1, (length - 1).clamp_min(0).unsqueeze(1))[:, 0]
    return Verdict(verdict.target_ids, length, bonus)
