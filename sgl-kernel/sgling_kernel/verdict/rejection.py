"""Lossless p/q rejection for drafts that were sampled from a known distribution (docs/dspark.md §2.8).

The emitted tokens follow the target's distribution exactly, whatever the drafter's; unlike sampled verify, a seed's
text depends on the drafts. Every draw of a round is keyed by the round's start, which never repeats, so that no noise
is used twice and a width chosen from earlier rounds cannot lean on draws of this one.
"""

from __future__ import annotations

import torch

from sgling_kernel.logits import argmax_lowest
from sgling_kernel.noise import gumbel_noise, uniform_noise
from sgling_kernel.sampling import (
    AdjustInputs,
    SamplingFlags,
    ShardReduce,
    adjust_logits,
    log_normalizer,
    target_scores,
)
from sgling_kernel.sampling.reference import MASS_ONE, tame
from sgling_kernel.verdict.reference import Verdict, chain_accept, target_ids_greedy

_STREAMS = {"draft": 0x5D8A1F3C, "accept": 0x2B7E4D91, "bonus": 0x71C6A05E}  # one domain per purpose
_START = 0x3C6EF372FE94F82B  # odd: starts map to distinct keys
_NO_MASS = 1e-8


def round_seed(seed: torch.Tensor, starts: torch.Tensor, purpose: str) -> torch.Tensor:
    """Noise seed int64 [bs] of one purpose (draft, accept, bonus) in the round that starts at lengths ``starts``."""
    return (seed ^ (_STREAMS[purpose] << 24)) + starts * _START


def draw_draft(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, vocab_start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(score fp32 [bs], local column int64 [bs]) of a token drawn from softmax(logits / T); T = 0: the largest logit.

    ``logits`` fp32 [bs, V_local]; ``seeds`` of purpose "draft"; ``positions`` int64 [bs] of the target rows.
    """
    sampled = (temperature > 0).unsqueeze(-1)
    noise = gumbel_noise(seeds, positions, vocab_start, logits.shape[-1])
    return argmax_lowest(torch.where(sampled, _tempered(logits, temperature) + noise, logits))


def verdict_rejection(
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    starts: torch.Tensor,
    limits: torch.Tensor,
    inputs: AdjustInputs,
    flags: SamplingFlags,
    reduce: ShardReduce,
) -> Verdict:
    """Verdict of a window whose drafts were drawn by :func:`draw_draft`; greedy requests may be among them.

    Args:
        logits: fp32 [bs * W, V_local] of the target.
        draft_logits: fp32 [bs, W - 1, V_local], what each draft was drawn from (before temperature).
        starts: int64 [bs], committed length before the round.
        limits: int64 [bs], drafts that may be accepted, 0 .. W - 1; behind them the bonus is a plain draw.
        inputs, flags, reduce: as for sampled verify; filters and penalties act on the target's distribution.
    """
    tables, (bs, width) = inputs.tables, inputs.candidates.shape
    adjusted = adjust_logits(logits, inputs, flags)
    rows = inputs.rows.repeat_interleave(width, output_size=logits.shape[0])
    shape = (tables.temperature[rows], tables.top_k[rows], tables.top_p[rows], tables.min_p[rows])
    scores = target_scores(adjusted, *shape, torch.zeros_like(adjusted), reduce, flags)
    log_p = _normalized(scores, reduce).view(bs, width, -1)
    temperature = tables.temperature[inputs.rows]
    log_q = _normalized(_tempered(draft_logits, temperature).flatten(0, 1), reduce).view_as(draft_logits)
    correct = _accepted(log_p, log_q, starts, inputs, reduce).minimum(limits)
    bonus = _bonus(log_p, log_q, correct, limits, starts, inputs, reduce)
    drafts = torch.cat((inputs.candidates[:, 1:].clamp_min(0), bonus.unsqueeze(-1)), dim=-1)
    step = torch.arange(width, device=logits.device)
    ids = torch.where(step == correct.unsqueeze(-1), bonus.unsqueeze(-1), drafts)
    greedy_ids = target_ids_greedy(adjusted, reduce, tables.vocab_start).view_as(ids)
    greedy_lens, _ = chain_accept(inputs.candidates, greedy_ids)
    greedy_lens = greedy_lens.minimum(limits + 1)
    greedy = temperature == 0
    ids = torch.where(greedy.unsqueeze(-1), greedy_ids, ids)
    lens = torch.where(greedy, greedy_lens, correct + 1)
    return Verdict(ids, lens, ids.gather(1, (lens - 1).unsqueeze(-1)).squeeze(-1))


def _accepted(
    log_p: torch.Tensor, log_q: torch.Tensor, starts: torch.Tensor, inputs: AdjustInputs, reduce: ShardReduce
) -> torch.Tensor:
    """Leading drafts that pass ``u * q(x) < p(x)``, int64 [bs]."""
    bs, width = inputs.candidates.shape
    if width == 1:
        return torch.zeros_like(starts)
    drafts, start = inputs.candidates[:, 1:].flatten(), inputs.tables.vocab_start
    p_x = _at(log_p[:, :-1].flatten(0, 1), drafts, reduce, start)
    q_x = _at(log_q.flatten(0, 1), drafts, reduce, start)
    seeds = round_seed(inputs.tables.seed[inputs.rows], starts, "accept")
    positions = inputs.positions.view(bs, width)[:, :-1].flatten()
    u = uniform_noise(seeds.repeat_interleave(width - 1, output_size=bs * (width - 1)), positions, 0, 1).squeeze(-1)
    return (u.log() + q_x < p_x).view(bs, -1).long().cumprod(-1).sum(-1)


def _bonus(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    correct: torch.Tensor,
    limits: torch.Tensor,
    starts: torch.Tensor,
    inputs: AdjustInputs,
    reduce: ShardReduce,
) -> torch.Tensor:
    """Token behind the accepted drafts, int64 [bs]: from max(p - q, 0) after a rejection, else from p."""
    bs, width, vocab = log_p.shape
    at = correct.view(bs, 1, 1).expand(-1, 1, vocab)
    p = log_p.gather(1, at).squeeze(1).exp()
    weight = p
    if width > 1:
        q = log_q.gather(1, at.clamp_max(width - 2)).squeeze(1).exp()
        residual = (p - q).clamp_min(0)
        mass = reduce.sum((residual * MASS_ONE).long().sum(-1))
        plain = (correct >= limits) | (mass <= _NO_MASS * MASS_ONE)
        weight = torch.where(plain.unsqueeze(-1), p, residual)
    tables = inputs.tables
    seeds = round_seed(tables.seed[inputs.rows], starts, "bonus")
    noise = gumbel_noise(seeds, starts + correct, tables.vocab_start, vocab)
    score, column = argmax_lowest(weight.log() + noise)
    return reduce.best(score, column + tables.vocab_start)[1]


def _tempered(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits [bs, ..., V] over the temperature [bs] of each request; greedy rows unchanged."""
    scale = torch.where(temperature > 0, temperature, 1.0)
    return logits / scale.view(-1, *(1,) * (logits.dim() - 1))


def _normalized(logits: torch.Tensor, reduce: ShardReduce) -> torch.Tensor:
    """log-softmax fp32 [N, V_local] over all shards."""
    clean = tame(logits)
    return clean - log_normalizer(clean, reduce).unsqueeze(-1)


def _at(log_p: torch.Tensor, ids: torch.Tensor, reduce: ShardReduce, vocab_start: int) -> torch.Tensor:
    """log p of global ids int64 [N] -> fp32 [N]."""
    column = ids - vocab_start
    local = (column >= 0) & (column < log_p.shape[-1])
    chosen = log_p.gather(1, column.clamp(0, log_p.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return reduce.max(torch.where(local, chosen, -torch.inf))
