"""Kimi Delta Attention: decode, verify with rollback, commit, prefill (projections are done by the caller)."""

from sgling_kernel.kda.cpu import kda_prefill
from sgling_kernel.kda.params import KDAParams, ReplayRing, StagedBuffers
from sgling_kernel.kda.reference import (
    commit_replay,
    commit_staged,
    kda_decode,
    kda_verify_replay,
    kda_verify_staged,
)

__all__ = [
    "KDAParams",
    "ReplayRing",
    "StagedBuffers",
    "commit_replay",
    "commit_staged",
    "kda_decode",
    "kda_prefill",
    "kda_verify_replay",
    "kda_verify_staged",
]
