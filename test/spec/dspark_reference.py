"""The training form of a DSpark drafter in plain torch: all blocks of a sequence at once, no cache, no paging.

An independent second writing of docs/dspark.md §1: the serving drafter is held to it, and tiny drafters are trained
through it. Parameters are a dict under the checkpoint's names; everything is fp32 and differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sgling.srt.config.dspark_config import DSparkConfig, LatentShape

Params = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, config: DSparkConfig) -> Tensor:
    """x [..., T, heads, D] with positions [..., T]."""
    theta, dim, neox = config.rope
    freq = theta ** (-torch.arange(0, dim, 2) / dim)
    angle = positions[..., None, None].float() * freq
    head, tail = x[..., :dim], x[..., dim:]
    a, b = head.chunk(2, -1) if neox else (head[..., 0::2], head[..., 1::2])
    ra, rb = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    turned = torch.cat((ra, rb), -1) if neox else torch.stack((ra, rb), -1).flatten(-2)
    return torch.cat((turned, tail), -1)


def keys_values(x: Tensor, positions: Tensor, p: Params, prefix: str, config: DSparkConfig) -> tuple[Tensor, Tensor]:
    """Expanded keys and values [..., T, query heads, D]."""
    shape, eps = config.attention, config.rms_norm_eps
    if isinstance(shape, LatentShape):
        latent, key = (x @ p[f"{prefix}.kv_a_proj_with_mqa.weight"].T).split((shape.latent, shape.rope), -1)
        latent = rms(latent, p[f"{prefix}.kv_a_layernorm.weight"], eps)
        both = (latent @ p[f"{prefix}.kv_b_proj.weight"].T).unflatten(-1, (shape.heads, -1))
        nope, value = both.split((shape.nope, shape.v_dim), -1)
        key = rope(key.unsqueeze(-2), positions, config).expand(*nope.shape[:-1], -1)
        return torch.cat((nope, key), -1), value
    key, value = ((x @ p[f"{prefix}.{leaf}_proj.weight"].T).unflatten(-1, (shape.kv_heads, -1)) for leaf in "kv")
    key = rope(rms(key, p[f"{prefix}.k_norm.weight"], eps), positions, config)
    group = shape.heads // shape.kv_heads
    return key.repeat_interleave(group, -2), value.repeat_interleave(group, -2)


def queries(x: Tensor, positions: Tensor, p: Params, prefix: str, config: DSparkConfig) -> Tensor:
    shape = config.attention
    q = (x @ p[f"{prefix}.q_proj.weight"].T).unflatten(-1, (shape.heads, -1))
    if isinstance(shape, LatentShape):
        return torch.cat((q[..., : shape.nope], rope(q[..., shape.nope :], positions, config)), -1)
    return rope(rms(q, p[f"{prefix}.q_norm.weight"], config.rms_norm_eps), positions, config)


def attention(x: Tensor, context: Tensor, anchors: Tensor, p: Params, config: DSparkConfig, layer: int) -> Tensor:
    """x [A, rows, d] block rows after the norm, context [S, d] projected features -> [A, rows, d]."""
    prefix, (causal, window) = f"layers.{layer}.self_attn", config.layers[layer]
    count, size = x.shape[1], context.shape[0]
    own = anchors[:, None] + torch.arange(count)
    q = queries(x, own, p, prefix, config)
    block_k, block_v = keys_values(x, own, p, prefix, config)
    ctx_k, ctx_v = keys_values(context, torch.arange(size), p, prefix, config)
    key = torch.cat((ctx_k.expand(len(x), -1, -1, -1), block_k), 1)
    value = torch.cat((ctx_v.expand(len(x), -1, -1, -1), block_v), 1)
    key_position = torch.cat((torch.arange(size).expand(len(x), -1), own), 1)
    is_block = torch.arange(size + count) >= size
    visible = is_block | (key_position < anchors[:, None])
    visible = visible[:, None].expand(-1, count, -1)
    if causal:
        visible = visible & (key_position[:, None] <= own[..., None])
    if window is not None:
        visible = visible & (key_position[:, None] > own[..., None] - window)
    scores = torch.einsum("athd,alhd->ahtl", q, key) * q.shape[-1] ** -0.5
    probs = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("ahtl,alhd->athd", probs, value)
    if isinstance(config.attention, LatentShape):
        out = out * torch.sigmoid(x @ p[f"{prefix}.g_proj.weight"].T)[..., None]
    return out.flatten(-2) @ p[f"{prefix}.o_proj.weight"].T


def block_hidden(
    p: Params, config: DSparkConfig, taps: Tensor, ids: Tensor, anchors: Tensor, embedding: Tensor
) -> Tensor:
    """Outputs of the rows that predict drafts [A, block, d]: taps [S, m*H] of ids [S], blocks at anchors [A]."""
    eps = config.rms_norm_eps
    context = rms(taps @ p["fc.weight"].T, p["hidden_norm.weight"], eps)
    block = torch.full((len(anchors), config.block_rows), config.mask_token_id)
    block[:, 0] = ids[anchors]
    x = embedding[block]
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        normed = rms(x, p[f"{prefix}.input_layernorm.weight"], eps)
        x = x + attention(normed, context, anchors, p, config, layer)
        normed = rms(x, p[f"{prefix}.post_attention_layernorm.weight"], eps)
        gate, up = (normed @ p[f"{prefix}.mlp.{leaf}_proj.weight"].T for leaf in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ p[f"{prefix}.mlp.down_proj.weight"].T
    return rms(x, p["norm.weight"], eps)[:, config.block_rows - config.block_size :]


def markov_bias(p: Params, config: DSparkConfig, hidden: Tensor, previous: Tensor) -> Tensor:
    """Bias of every row [A, block, V] from teacher-forced predecessors int64 [A, block]."""
    embedded, w2 = p["markov_head.markov_w1.weight"][previous], p["markov_head.markov_w2.weight"]
    if config.markov_head_type == "vanilla":
        return embedded @ w2.T
    if config.markov_head_type == "gated":
        joint = torch.cat((hidden, embedded), -1) @ p["markov_head.gate_proj.weight"].T
        return (torch.sigmoid(joint + p["markov_head.gate_proj.bias"]) * embedded) @ w2.T
    state, out = torch.zeros_like(embedded[:, 0]), []
    for k in range(previous.shape[1]):
        joint = torch.cat((state, embedded[:, k], hidden[:, k]), -1) @ p["markov_head.joint_proj.weight"].T
        keep, new, mixed = (joint + p["markov_head.joint_proj.bias"]).chunk(3, -1)
        state = torch.sigmoid(keep) * state + (1 - torch.sigmoid(keep)) * new.tanh()
        out.append(mixed.tanh() @ w2.T)
    return torch.stack(out, 1)


def confidence(p: Params, config: DSparkConfig, hidden: Tensor, previous: Tensor) -> Tensor:
    """Raw confidence logits [A, block]."""
    x = hidden
    if config.confidence_with_markov:
        x = torch.cat((hidden, p["markov_head.markov_w1.weight"][previous]), -1)
    return (x @ p["confidence_head.proj.weight"].T + p["confidence_head.proj.bias"]).squeeze(-1)
