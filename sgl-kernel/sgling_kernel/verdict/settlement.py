"""The end of a verify: the verdict into every buffer that the next nodes, the next step or the host read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling_kernel.noise import uniform_noise
from sgling_kernel.relay.reference import scatter_relay
from sgling_kernel.verdict.reference import Verdict

SIMULATION_SEED = 20_26  # any constant: runs of the same length sequence draw the same accept lengths


class Sinks(NamedTuple):
    """Where a verdict goes, in place; None = nobody reads it there.

    Attributes:
        new_seq_lens, output_tokens: int64 [R], relay buffers indexed by request row.
        target_ids, accept_lens, seq_lens: int64 [bs, W], [bs], [bs]: ids, accept lengths, length before the step.
        features: ([bs * W, F] source, target of the same shape), what the drafter reads of a verify.
        packed: int64 [bs, W + 1], ids and accept length side by side for the host.
    """

    new_seq_lens: torch.Tensor
    output_tokens: torch.Tensor
    target_ids: torch.Tensor | None = None
    accept_lens: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    features: tuple[torch.Tensor, torch.Tensor] | None = None
    packed: torch.Tensor | None = None


def simulated_verdict(verdict: Verdict, seq_lens: torch.Tensor, mean: float) -> Verdict:
    """Accept lengths floor(mean) or one more, at most W, so that their mean is ``mean``; padded rows stay 0.

    ``seq_lens`` int64 [bs], committed lengths before the step, key the draw; the bonus is the last id that now counts.
    """
    width = verdict.target_ids.shape[1]
    draw = uniform_noise(torch.full_like(seq_lens, SIMULATION_SEED), seq_lens, 0, 1)[:, 0]
    length = (int(mean) + (draw < mean - int(mean)).long()).clamp_max(width)
    length = torch.where(verdict.accept_lens > 0, length, 0)
    bonus = verdict.target_ids.gather(1, (length - 1).clamp_min(0).unsqueeze(1))[:, 0]
    return Verdict(verdict.target_ids, length, bonus)


def settle(
    verdict: Verdict, rows: torch.Tensor, seq_lens: torch.Tensor, sinks: Sinks, simulated: float | None = None
) -> Verdict:
    """Write a verdict into its sinks and return it.

    Args:
        rows, seq_lens: int64 [bs], request rows and committed lengths before the step.
        simulated: mean accept length that replaces the true ones (:func:`simulated_verdict`), or None.
    """
    if simulated is not None:
        verdict = simulated_verdict(verdict, seq_lens, simulated)
    relayed = (sinks.new_seq_lens, sinks.output_tokens)
    scatter_relay(relayed, rows, (seq_lens + verdict.accept_lens, verdict.bonus))
    written = [(sinks.target_ids, verdict.target_ids), (sinks.accept_lens, verdict.accept_lens)]
    written.append((sinks.seq_lens, seq_lens))
    if sinks.features is not None:
        written.append((sinks.features[1], sinks.features[0]))
    if sinks.packed is not None:
        written += [(sinks.packed[:, :-1], verdict.target_ids), (sinks.packed[:, -1], verdict.accept_lens)]
    for target, value in written:
        if target is not None:
            target.copy_(value)
    return verdict
