"""Verdict of a verify step: which drafts are accepted and which token comes next, and who is told."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.noise import seed_key
from sgling_kernel.verdict import settlement
from sgling_kernel.verdict.reference import (
    Verdict,
    chain_accept,
    target_ids_greedy,
    target_ids_sampled,
    verdict_greedy,
    verdict_masked,
    verdict_sampled,
    without_padding,
)
from sgling_kernel.verdict.rejection import draw_draft, round_seed, verdict_rejection
from sgling_kernel.verdict.settlement import SIMULATION_SEED, Sinks, simulated_verdict

__all__ = [
    "Sinks",
    "Verdict",
    "chain_accept",
    "draw_draft",
    "round_seed",
    "settle",
    "simulated_verdict",
    "target_ids_greedy",
    "target_ids_sampled",
    "verdict_greedy",
    "verdict_masked",
    "verdict_rejection",
    "verdict_sampled",
    "without_padding",
]


def settle(verdict: Verdict, rows: Tensor, seq_lens: Tensor, sinks: Sinks, simulated: float | None = None) -> Verdict:
    """Write a verdict into everything that reads it, in one node on a GPU; see settlement.settle."""
    if dispatch.use_triton(rows):
        from sgling_kernel.verdict import kernel

        drawn = None if simulated is None else (simulated, seed_key(SIMULATION_SEED))
        return kernel.settle(verdict, rows, seq_lens, sinks, drawn)
    return settlement.settle(verdict, rows, seq_lens, sinks, simulated)
