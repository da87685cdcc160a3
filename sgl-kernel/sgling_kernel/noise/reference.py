"""Counter-based noise: a pure function of (seed, position, global token id), so draws depend on nothing else.

A row key is mixed in 64-bit wrap-around arithmetic (the finaliser of SplitMix64, Steele et al. 2014); each token then
mixes its id with the two halves of that key in 32 bits (multiply and xor-shift rounds of "lowbias32", C. Wellons).
Integer arithmetic gives the same bits on every device. torch shifts are arithmetic, hence the masks after them.
"""

from __future__ import annotations

from functools import cache

import torch

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed integer
_MIX1, _MIX2 = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64
_LOW1, _LOW2 = 0x7FEB352D, 0x846CA68B - 2**32  # lowbias32
_UNIT = 2.0**-31
_BELOW_ONE = 1.0 - 2.0**-24  # largest fp32 below 1


def gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab_start: int, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise of every token of a vocabulary range; arg-max(log p + noise) draws from p.

    Args:
        seed: int64 [N], seed of each row's request.
        position: int64 [N], index of the token to draw minus 1. That is a target row's own position; a NEXTN row at
            position p reads token p + 1 and draws token p + 2, so it passes p + 1.
        vocab_start, vocab_size: token ids ``vocab_start .. vocab_start + vocab_size - 1``.

    Returns:
        fp32 [N, vocab_size], finite, in about [-2.9, 22.2]. Any range is the exact slice of the whole vocabulary.
        Formula -log(-log(1 - u)): small u, the draws of unlikely tokens, keep their full fp32 resolution.
    """
    return uniform_noise(seed, position, vocab_start, vocab_size).neg_().log1p_().neg_().log_().neg_()


def uniform_noise(seed: torch.Tensor, position: torch.Tensor, vocab_start: int, vocab_size: int) -> torch.Tensor:
    """Uniform noise fp32 [N, vocab_size] in [2^-32, 1 - 2^-24]: never 0, never 1. Arguments as :func:`gumbel_noise`."""
    key = _mix64(_mix64(seed + _GOLDEN) + position * _GOLDEN)
    words = key.unsqueeze(-1).view(torch.int32)  # low and high half, [N, 2]
    token = torch.arange(vocab_start, vocab_start + vocab_size, dtype=torch.int32, device=seed.device)
    bits = _hash32(token, words[:, :1], words[:, 1:])
    return bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(_UNIT).clamp_(max=_BELOW_ONE)


@cache
def seed_key(seed: int) -> int:
    """Key of a seed before its positions are mixed in, as a signed 64-bit host integer (for fused kernels)."""
    x = (seed + _GOLDEN) % 2**64
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        x = (x ^ x >> shift) * factor % 2**64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """Bijective 64-bit mix."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _hash32(token: torch.Tensor, key_low: torch.Tensor, key_high: torch.Tensor) -> torch.Tensor:
    """32-bit hash of ``token`` [V] under two key words [N, 1] -> int32 [N, V].

    The second word enters between the rounds, so that rows differ by more than a shift or a permutation of token ids.
    """
    x = token ^ key_low
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_LOW1)
    x.add_(key_high).bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_LOW2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
