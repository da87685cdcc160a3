"""Training losses: next token, NEXTN token, and the self-fed chain loss of the NEXTN layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from . import ops
from .model import MLA, Pico, mla_outputs
from .ops import Layout, compiled, linear, rms_norm


def targets(tokens: torch.Tensor, layout: Layout, ahead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Label of position p is token p + ``ahead``, valid only inside the document. -> (labels [N], valid bool [N])."""
    documents = layout.documents
    valid = documents.roll(-ahead) == documents
    valid[-ahead:] = False
    return tokens.roll(-ahead), valid


@compiled
def cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of token losses and of correct top-1 predictions, divided by the weight sum."""
    logits = linear(hidden, head).float()
    losses = F.cross_entropy(logits, labels, reduction="none")
    total = weights.sum().clamp(min=1.0)
    hits = (logits.argmax(-1) == labels).float()
    return (losses * weights).sum() / total, (hits * weights).sum() / total


class StepLosses(NamedTuple):
    """Scalars of one training step."""

    main: torch.Tensor
    nextn: torch.Tensor
    main_hits: torch.Tensor
    nextn_hits: torch.Tensor


def joint_losses(
    model: Pico, tokens: torch.Tensor, answer: torch.Tensor, layout: Layout, prompt_weight: float
) -> StepLosses:
    """Next-token and NEXTN losses of one stream; tokens outside assistant turns count ``prompt_weight``."""
    hidden = model.trunk(tokens, layout)
    drafted = model.draft(tokens, hidden, layout)
    worth = answer.float() * (1 - prompt_weight) + prompt_weight
    labels, valid = targets(tokens, layout, 1)
    main, main_hits = cross_entropy(hidden, model.head, labels, worth.roll(-1) * valid)
    labels, valid = targets(tokens, layout, 2)
    nextn, nextn_hits = cross_entropy(drafted, model.head, labels, worth.roll(-2) * valid)
    return StepLosses(main, nextn, main_hits, nextn_hits)


class Chain(NamedTuple):
    """Keys and values of one chain step: k [R, L, H, D], v [R, L, H, V]."""

    keys: torch.Tensor
    values: torch.Tensor


def chain_attention(q: torch.Tensor, past: Chain, own: list[Chain], blocked: torch.Tensor) -> torch.Tensor:
    """Attention of chain step j at every start p: true entries up to p, then this chain's own drafted entries.

    q [R, L, H, D]; ``blocked`` bool [R, L, L] is True where a true entry is in the future or in another document.
    """
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("rlhd,rmhd->rhlm", q, past.keys).float() * scale
    scores = scores.masked_fill(blocked[:, None], float("-inf"))
    extra = [torch.einsum("rlhd,rlhd->rhl", q.float(), entry.keys.float()).unsqueeze(-1) * scale for entry in own]
    weights = torch.cat((scores, *extra), dim=-1).softmax(-1).to(q.dtype)
    length = past.keys.shape[1]
    out = torch.einsum("rhlm,rmhv->rlhv", weights[..., :length], past.values)
    for index, entry in enumerate(own):
        out = out + weights[..., length + index].transpose(1, 2).unsqueeze(-1) * entry.values
    return out


class Rows(NamedTuple):
    """Rows of packed documents for the chain loss, all [R, L]: tokens, documents, positions int64; answer bool."""

    tokens: torch.Tensor
    answer: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor


def chain_hiddens(model: Pico, rows: Rows, hidden: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Drafted hiddens y_1 ... y_steps [R, L, d], each step fed with the one before, as the server drafts.

    Step j starts from y_{j-1} of the same start p and the embedding of token p + j, at position p + j - 1.
    """
    nextn = model.nextn
    mla: MLA = nextn.layer.attention
    shape = rows.tokens.shape
    same = rows.documents[:, :, None] == rows.documents[:, None, :]
    blocked = ~(same & torch.ones(shape[1], shape[1], dtype=torch.bool, device=same.device).tril())
    past: Chain | None = None
    own: list[Chain] = []
    outputs: list[torch.Tensor] = []
    carried = hidden
    for step in range(1, steps + 1):
        x = nextn.joined(model.embed(rows.tokens.roll(-step, 1)), carried).flatten(0, 1)
        q, k, v, gate = mla.inputs(x, (rows.positions + step - 1).flatten())
        entry = Chain(k.unflatten(0, shape), v.unflatten(0, shape))
        if past is None:
            past = entry
        else:
            own.append(entry)
        o = chain_attention(q.unflatten(0, shape), past, own, blocked)
        x = nextn.layer.ffn(mla_outputs(x, o.flatten(0, 1), gate, mla.dense))
        carried = rms_norm(x, nextn.final_norm, nextn.eps).unflatten(0, shape)
        outputs.append(carried)
    return outputs


@compiled
def soft_cross_entropy(
    hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy against the trunk's distribution, and the share of positions whose top-1 agrees."""
    logits = linear(hidden, head).float()
    teacher_logits = linear(teacher, head).float()
    total = weights.sum().clamp(min=1.0)
    losses = -(teacher_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    hits = (logits.argmax(-1) == teacher_logits.argmax(-1)).float()
    return (losses * weights).sum() / total, (hits * weights).sum() / total


def chain_losses(
    model: Pico, rows: Rows, hidden: torch.Tensor, steps: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Loss and top-1 agreement with the trunk of every chain step; step j of start p is judged at position p + j."""
    losses, hits = [], []
    for step, drafted in enumerate(chain_hiddens(model, rows, hidden, steps), start=1):
        teacher = hidden.roll(-step, 1)
        ahead = step + 1
        valid = (rows.documents.roll(-ahead, 1) == rows.documents) & rows.answer.roll(-ahead, 1)
        valid[:, -ahead:] = False
        loss, hit = soft_cross_entropy(
            drafted.flatten(0, 1), model.head, teacher.flatten(0, 1), valid.flatten().float()
        )
        losses.append(loss)
        hits.append(hit)
    return losses, hits


def rows_layout(rows: Rows) -> Layout:
    """The flat layout of rows, so that the trunk can run over them."""
    starts = (rows.positions.flatten() == 0).nonzero().flatten().tolist()
    return ops.make_layout(starts, rows.tokens.numel(), rows.tokens.device)
