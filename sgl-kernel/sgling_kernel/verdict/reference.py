"""Chain verdict by "sampled verify": the target token of every row is drawn once, drafts are kept while they equal it.

Greedy is the special case without noise. The emitted text for a seed is the text without speculation, because row j
sees exactly what a single decode step at that position would see. Only (score, id) pairs cross vocabulary shards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgling_kernel import dispatch
from sgling_kernel.logits import argmax_lowest
from sgling_kernel.noise import gumbel_noise
from sgling_kernel.sampling import AdjustInputs, SamplingFlags, ShardReduce, SingleShard, adjust_logits, target_scores


class Verdict(NamedTuple):
    """Result of a verify step.

    Attributes:
        target_ids: int64 [bs, W], the target's token after each row; the first ``accept_lens`` of them are emitted.
        accept_lens: int64 [bs], emitted tokens, 1 .. W (accepted drafts + 1).
        bonus: int64 [bs], last emitted token, the root of the next window.
    """

    target_ids: torch.Tensor
    accept_lens: torch.Tensor
    bonus: torch.Tensor


def chain_accept(candidates: torch.Tensor, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Longest matching prefix: (accept_lens int64 [bs] >= 1, bonus int64 [bs]).

    ``candidates`` int64 [bs, W] = root and drafts; draft j is right when it equals ``target_ids[:, j - 1]`` [bs, W].
    """
    matches = (candidates[:, 1:] == target_ids[:, :-1]).long()
    correct = matches.cumprod(dim=-1).sum(dim=-1)
    bonus = target_ids.gather(1, correct.unsqueeze(-1)).squeeze(-1)
    return correct + 1, bonus


def target_ids_greedy(logits: torch.Tensor, reduce: ShardReduce, vocab_start: int) -> torch.Tensor:
    """Arg-max token of each row, over all vocabulary shards: ``logits`` [N, V_local] -> int64 [N]."""
    score, column = argmax_lowest(logits)
    return reduce.best(score, column + vocab_start)[1]


def target_ids_sampled(
    logits: torch.Tensor, inputs: AdjustInputs, flags: SamplingFlags, reduce: ShardReduce
) -> torch.Tensor:
    """Token drawn for each row from its request's distribution: ``logits`` fp32 [N, V_local] -> int64 [N].

    Used by verify, plain decode, prefill (W = 1 each) and drafting. Temperature-0 rows give the greedy token.
    """
    tables = inputs.tables
    adjusted = adjust_logits(logits, inputs, flags)
    if flags.sampled:
        rows = inputs.rows.repeat_interleave(inputs.candidates.shape[1], output_size=logits.shape[0])
        noise = gumbel_noise(tables.seed[rows], inputs.positions, tables.vocab_start, logits.shape[-1])
        adjusted = target_scores(
            adjusted,
            tables.temperature[rows],
            tables.top_k[rows],
            tables.top_p[rows],
            tables.min_p[rows],
            noise,
            reduce,
            flags,
        )
    return target_ids_greedy(adjusted, reduce, tables.vocab_start)


def verdict_greedy(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    reduce: ShardReduce,
    vocab_start: int,
    rows: torch.Tensor | None = None,
) -> Verdict:
    """Verdict when every request is greedy without adjustments.

    ``logits`` [bs*W, V_local]; ``candidates`` int64 [bs, W]; ``vocab_start``: first token id of this shard; ``rows``
    int64 [bs]: nothing is accepted for request row 0 (padding).
    """
    if dispatch.use_triton(logits) and isinstance(reduce, SingleShard) and logits.stride(-1) == 1:
        from sgling_kernel.verdict import kernel

        return Verdict(*kernel.verdict_greedy(logits, candidates, vocab_start, rows))
    verdict = _judge(target_ids_greedy(logits, reduce, vocab_start), candidates)
    return verdict if rows is None else without_padding(verdict, rows)


def without_padding(verdict: Verdict, rows: torch.Tensor) -> Verdict:
    """The verdict with nothing accepted for padded requests (row 0 of ``rows`` int64 [bs])."""
    return verdict._replace(accept_lens=torch.where(rows > 0, verdict.accept_lens, 0))


def verdict_sampled(logits: torch.Tensor, inputs: AdjustInputs, flags: SamplingFlags, reduce: ShardReduce) -> Verdict:
    """Verdict with per-request sampling parameters; ``logits`` fp32 [bs*W, V_local]. Greedy rows may be among them."""
    return _judge(target_ids_sampled(logits, inputs, flags, reduce), inputs.candidates)


def verdict_masked(logits: torch.Tensor, inputs: AdjustInputs, flags: SamplingFlags, reduce: ShardReduce) -> Verdict:
    """:func:`verdict_sampled` under a vocabulary mask (``inputs.vocab_mask``); rows without grammar hold all ones."""
    if inputs.vocab_mask is None:
        raise ValueError("verdict_masked needs AdjustInputs.vocab_mask")
    return verdict_sampled(logits, inputs, flags, reduce)


def _judge(target_ids: torch.Tensor, candidates: torch.Tensor) -> Verdict:
    target_ids = target_ids.view_as(candidates)
    if dispatch.use_triton(target_ids):
        from sgling_kernel.verdict import kernel

        return Verdict(target_ids, *kernel.chain_accept(candidates, target_ids))
    return Verdict(target_ids, *chain_accept(candidates, target_ids))
