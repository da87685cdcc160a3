"""Verdict of a verify step: which drafts are accepted and which token comes next."""

from sgling_kernel.verdict.reference import (
    Verdict,
    chain_accept,
    target_ids_greedy,
    target_ids_sampled,
    verdict_greedy,
    verdict_masked,
    verdict_sampled,
)
from sgling_kernel.verdict.rejection import draw_draft, round_seed, verdict_rejection

__all__ = [
    "Verdict",
    "chain_accept",
    "draw_draft",
    "round_seed",
    "target_ids_greedy",
    "target_ids_sampled",
    "verdict_greedy",
    "verdict_masked",
    "verdict_rejection",
    "verdict_sampled",
]
