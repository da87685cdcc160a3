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

__all__ = [
    "Verdict",
    "chain_accept",
    "target_ids_greedy",
    "target_ids_sampled",
    "verdict_greedy",
    "verdict_masked",
    "verdict_sampled",
]
