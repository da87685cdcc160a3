"""Typed bundles that cross the KDA operator boundary: layer constants and the two rollback stores."""

from typing import NamedTuple

import torch


class KDAParams(NamedTuple):
    """Constants of one KDA layer, all fp32 whatever the model dtype (docs/ling3.md §2.7).

    Attributes:
        conv_weight: [C, 4] depth-wise taps, tap 0 the oldest row, tap 3 the current one; C = 3·H·K, channels q | k | v.
        a_log: [H]; the gate is multiplied by ``+exp(a_log)``.
        dt_bias: [H, K] added to the decay pre-activation f.
        lower_bound: the log-decay lies in (lower_bound, 0); -5.0 in Ling-3.0.
    """

    conv_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float


class StagedBuffers(NamedTuple):
    """Rollback by snapshot: what working slot s would hold after verify row j. Commits take a leading layer dim.

    Attributes:
        conv: [S, W, 3, C] model dtype, the pre-conv window after row j (oldest row first).
        state: [S, W, H, V, K] fp32, the recurrent state after row j.
    """

    conv: torch.Tensor
    state: torch.Tensor


class ReplayRing(NamedTuple):
    """Rollback by replay: inputs of the step at position p, in entry ``p & (ring - 1)``; ring is a power of two >= 2W.

    Attributes:
        x: [S, ring, C] model dtype, pre-conv rows.
        k: [S, ring, H, K] model dtype, post-conv, rounded, before l2 normalisation.
        v: [S, ring, H, V] model dtype, post-conv, rounded.
        g: [S, ring, H, K] fp32 log-decay.
        beta: [S, ring, H] fp32.
    """

    x: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
