"""Markov and confidence heads in training form: teacher-forced along the block, or step by step on their own drafts."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..ops import linear
from .drafter import Drafter


def embed(drafter: Drafter, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int64 [...] -> [..., rank]."""
    return F.embedding(tokens, drafter.params["markov_head.markov_w1.weight"]).to(dtype)


def mix(drafter: Drafter, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor):
    """(what W2 reads, next state) of one row; all [..., rank], ``hidden`` [..., d] (docs/dspark.md §1.4)."""
    kind, params = drafter.config.markov_head_type, drafter.params
    if kind == "vanilla":
        return embedded, state
    if kind == "gated":
        gate = linear(torch.cat((hidden, embedded), -1), params["markov_head.gate_proj.weight"]).float()
        return embedded * torch.sigmoid(gate + params["markov_head.gate_proj.bias"]).to(embedded.dtype), state
    joint = linear(torch.cat((state, embedded, hidden), -1), params["markov_head.joint_proj.weight"]).float()
    keep, new, out = (joint + params["markov_head.joint_proj.bias"]).chunk(3, -1)
    keep = torch.sigmoid(keep)
    state = (keep * state.float() + (1 - keep) * new.tanh()).to(embedded.dtype)
    return out.tanh().to(embedded.dtype), state


def forced_mix(drafter: Drafter, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """What W2 reads for every row of blocks [..., g, rank], predecessors ``previous`` int64 [..., g] given."""
    embedded = embed(drafter, previous, hidden.dtype)
    if drafter.config.markov_head_type != "rnn":
        return mix(drafter, embedded, hidden, embedded)[0]
    state, found = torch.zeros_like(embedded[..., 0, :]), []
    for k in range(previous.shape[-1]):
        out, state = mix(drafter, embedded[..., k, :], hidden[..., k, :], state)
        found.append(out)
    return torch.stack(found, -2)


def confidence(drafter: Drafter, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Raw confidence logits fp32 [..., g]; no gradient reaches the backbone or the Markov head."""
    x = hidden.detach().float()
    if drafter.config.confidence_with_markov:
        x = torch.cat((x, embed(drafter, previous, torch.float32).detach()), -1)
    logits = F.linear(x, drafter.params["confidence_head.proj.weight"], drafter.params["confidence_head.proj.bias"])
    return logits.squeeze(-1)


def greedy_drafts(drafter: Drafter, hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Drafts of every block as the server makes them at temperature 0: hidden [N, g, d], anchor ids [N] -> [N, g]."""
    has_markov = drafter.config.markov_rank > 0
    previous, drafts, state = anchors, [], None
    if has_markov:
        state = hidden.new_zeros(len(anchors), drafter.config.markov_rank)
    for k in range(hidden.shape[1]):
        logits = linear(hidden[:, k], drafter.head).float()
        if has_markov:
            read, state = mix(drafter, embed(drafter, previous, hidden.dtype), hidden[:, k], state)
            logits = logits + linear(read, drafter.params["markov_head.markov_w2.weight"]).float()
        previous = logits.argmax(-1)
        drafts.append(previous)
    return torch.stack(drafts, 1)
