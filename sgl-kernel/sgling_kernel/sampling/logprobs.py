"""Log probabilities of chosen and of most likely tokens, without gathering logits over vocabulary shards."""

from __future__ import annotations

import math

import torch

from sgling_kernel.sampling.reference import MASS_ONE, fixed_mass, ordered_bits, row_max, tame
from sgling_kernel.sampling.types import ShardReduce


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, reduce: ShardReduce, vocab_start: int) -> torch.Tensor:
    """Log-softmax of ``logits`` fp32 [N, V_local] at global ids int64 [N] or [N, m] -> fp32 of the same shape.

    The caller divides by the temperature first where tempered logprobs are wanted. Exactly equal for any sharding.
    """
    clean = tame(logits)
    column = ids.reshape(ids.shape[0], -1) - vocab_start
    local = (column >= 0) & (column < logits.shape[-1])
    chosen = clean.gather(1, column.clamp(0, logits.shape[-1] - 1))
    chosen = reduce.max(torch.where(local, chosen, -torch.inf))
    return (chosen - log_normalizer(clean, reduce).unsqueeze(-1)).view(ids.shape)


def top_logprobs(
    logits: torch.Tensor, k: int, reduce: ShardReduce, vocab_start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens of each row, best first: (logprobs fp32 [N, k], global ids int64 [N, k]).

    The lowest id comes first among equals. Shards are merged by k rounds of ``reduce.best`` over their sorted heads.
    Requires k <= V_local (``logits`` fp32 [N, V_local]); NaN counts as -inf.
    """
    if k > logits.shape[-1]:
        raise ValueError(f"top_logprobs: k = {k} exceeds the vocabulary shard of {logits.shape[-1]} tokens")
    if k == 0:
        return logits.new_empty(len(logits), 0), logits.new_empty(len(logits), 0, dtype=torch.int64)
    clean = tame(logits)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    order = ((ordered_bits(clean).long() << 32) - columns).topk(k, dim=-1).indices  # unique keys: ties are decided
    values = clean.gather(1, order)
    head = torch.zeros(logits.shape[0], 1, dtype=torch.int64, device=logits.device)
    scores, ids = [], []
    for _ in range(k):
        mine = order.gather(1, head).squeeze(-1) + vocab_start
        score, best = reduce.best(values.gather(1, head).squeeze(-1), mine)
        head = head + (best == mine).long().unsqueeze(-1)
        scores.append(score)
        ids.append(best)
    top = torch.stack(scores, dim=-1)
    return top - log_normalizer(clean, reduce).unsqueeze(-1), torch.stack(ids, dim=-1)


def log_normalizer(clean: torch.Tensor, reduce: ShardReduce) -> torch.Tensor:
    """log(sum(exp(clean))) of each tamed row over all shards, fp32 [N]; integer masses make the sum exact."""
    peak = row_max(clean, reduce)
    total = reduce.sum(fixed_mass(clean - peak.unsqueeze(-1)).sum(dim=-1)).clamp(min=1)  # 0 only without a finite logit
    return peak + (total.double().log() - math.log(MASS_ONE)).float()
