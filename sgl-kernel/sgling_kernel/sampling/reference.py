"""Target scores: temperature, top-k, top-p and min-p, then Gumbel noise; arg-max of them is the draw.

Filters are thresholds, found without sorting by a radix select on the ordered bits of the scaled logits. Counts and
fixed-point masses are integers, so sums over columns and over vocabulary shards are exact in any order: a sharded
vocabulary gives the very bits of a single shard, and a row does not depend on its neighbours.
"""

from __future__ import annotations

import torch

from sgling_kernel.sampling.types import SamplingFlags, ShardReduce

MASS_ONE = 2**42  # fixed-point 1.0 of exp(x - max); sums fit int64 up to 2^20 tokens
_DIGIT_BITS = 8
_FP32_MAX = torch.finfo(torch.float32).max


def target_scores(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor | None,
    reduce: ShardReduce,
    flags: SamplingFlags,
) -> torch.Tensor:
    """Scores fp32 [N, V_local] whose arg-max over all shards is each row's token.

    Rows with temperature 0, and all rows when ``noise`` is None, are the logits themselves. Other rows are
    log p + noise up to a constant per row (the log normaliser moves no arg-max); filtered tokens are -inf.

    Args:
        logits: fp32 [N, V_local], after :func:`adjust_logits`. NaN counts as -inf.
        temperature, top_p, min_p: fp32 [N]; top_k: int64 [N]. Neutral values: top_p 1, min_p 0, top_k below 1.
        noise: fp32 [N, V_local], :func:`gumbel_noise` of this shard's token ids.
        reduce: reductions over vocabulary shards.
        flags: which filters any row needs.

    Filters apply in upstream's order: top-k (tokens equal to the k-th largest are all kept), then top-p on the mass
    that is left (the fewest largest tokens reaching it, ties kept), then min-p relative to the most likely token.
    """
    if noise is None:
        return logits
    sampled = temperature > 0
    scaled = tame(logits / torch.where(sampled, temperature, 1.0).unsqueeze(-1))
    log_p = scaled - row_max(scaled, reduce).unsqueeze(-1)
    keep = None
    if flags.top_k or flags.top_p:
        keep = _keep_top(log_p, top_k, top_p, reduce, flags)
    if flags.min_p:
        likely = log_p >= min_p.log().unsqueeze(-1)
        keep = likely if keep is None else keep & likely
    scores = log_p + noise
    if keep is not None:
        scores = torch.where(keep, scores, -torch.inf)
    return torch.where(sampled.unsqueeze(-1), scores, logits)


def tame(x: torch.Tensor) -> torch.Tensor:
    """``x`` with NaN as -inf and +inf as the largest finite number, so that differences of a row are never NaN."""
    return x.nan_to_num(nan=-torch.inf, posinf=_FP32_MAX, neginf=-torch.inf)


def row_max(x: torch.Tensor, reduce: ShardReduce) -> torch.Tensor:
    """Finite maximum of each row of tamed ``x`` over all shards, fp32 [N] (-inf gives the lowest finite number)."""
    return reduce.max(x.amax(dim=-1)).clamp(min=-_FP32_MAX)


def fixed_mass(log_p: torch.Tensor) -> torch.Tensor:
    """exp(log_p) for log_p <= 0 in fixed point, int64; multiples of 2^-42."""
    return (log_p.exp() * MASS_ONE).long()


def _keep_top(
    log_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, reduce: ShardReduce, flags: SamplingFlags
) -> torch.Tensor:
    """bool [N, V_local]: tokens that survive top-k and then top-p."""
    keys = ordered_bits(log_p)
    keep = torch.ones_like(keys, dtype=torch.bool)
    if flags.top_k:
        threshold = _select_threshold(keys, keep.long(), top_k, reduce)
        keep = (keys >= threshold.unsqueeze(-1)) | (top_k < 1).unsqueeze(-1)
    if flags.top_p:
        mass = fixed_mass(log_p).masked_fill(~keep, 0)
        total = reduce.sum(mass.sum(dim=-1))
        wanted = (total.double() * top_p.double()).long().clamp(min=1)
        threshold = _select_threshold(keys, mass, wanted, reduce)
        keep = keep & ((keys >= threshold.unsqueeze(-1)) | (top_p >= 1).unsqueeze(-1))
    return keep


def ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """int32 keys that order like the fp32 numbers of ``x`` (no NaN); -0.0 and 0.0 get the same key."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _select_threshold(
    keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor, reduce: ShardReduce
) -> torch.Tensor:
    """Largest key t (int32 [N]) such that the weight of tokens with key >= t reaches ``wanted`` int64 [N].

    Radix select from the top digit down over a histogram of weights (int64 [N, V_local]); 4 passes of 256 bins. If the
    total weight is less than wanted, t is the smallest possible key.
    """
    rows, bins = keys.shape[0], 1 << _DIGIT_BITS
    bits = keys ^ -(2**31)  # unsigned order; the shifts below are arithmetic, hence the masks
    prefix, zero = torch.zeros_like(wanted), weights.new_zeros(())
    for shift in range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        matching = weights
        if shift + _DIGIT_BITS < 32:
            upper = (bits >> (shift + _DIGIT_BITS)) & ((1 << (32 - _DIGIT_BITS - shift)) - 1)
            matching = torch.where(upper == prefix.int().unsqueeze(-1), weights, zero)
        digits = ((bits >> shift) & (bins - 1)).long()
        histogram = torch.zeros(rows, bins, dtype=torch.int64, device=keys.device).scatter_add_(1, digits, matching)
        at_least = reduce.sum(histogram).flip(-1).cumsum(-1).flip(-1)  # weight of digit >= d
        digit = ((at_least >= wanted.unsqueeze(-1)).sum(dim=-1) - 1).clamp(min=0)
        above = at_least.gather(1, (digit + 1).clamp(max=bins - 1).unsqueeze(-1)).squeeze(-1)
        wanted = wanted - torch.where(digit < bins - 1, above, 0)
        prefix = (prefix << _DIGIT_BITS) | digit
    return (prefix - 2**31).int()
