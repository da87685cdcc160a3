"""The trainable DSpark drafter: all blocks of packed rows at once, under the public checkpoint's tensor names.

Terms as in docs/dspark.md: a block at anchor index i of a row has the rows i ... i + rows - 1; it sees context entries
of its own conversation before the anchor, and its own rows. Shapes: R rows, S tokens, A blocks a row, g rows a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from sgling.srt.config.dspark_config import DSparkConfig, LatentShape
from sgling.srt.model_loader.draft_inventory import draft_tensors

from ..ops import compiled, linear, rms_norm, swiglu
from .rows import Anchors
from .target import Features


class Blocks(NamedTuple):
    """Of a batch: row index of anchors [R, A]; positions in the conversation [R, A, g]; visible context [R, A, S]."""

    index: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor


def make_blocks(features: Features, anchors: Anchors, count: int) -> Blocks:
    """``count``: rows of a block."""
    rows, index = features.rows, anchors.index
    steps = torch.arange(count, device=index.device)
    positions = rows.positions.gather(1, index).unsqueeze(-1) + steps
    same = rows.documents.gather(1, index).unsqueeze(-1) == rows.documents.unsqueeze(1)
    before = torch.arange(rows.tokens.shape[1], device=index.device) < index.unsqueeze(-1)
    return Blocks(index, positions, same & before)


def rotate(x: torch.Tensor, positions: torch.Tensor, config: DSparkConfig) -> torch.Tensor:
    """Rotary embedding of the leading dimensions of x [..., heads, D] at integer positions [...]."""
    theta, dim, neox = config.rope
    half = dim // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[..., None, None] * rates
    cos, sin = angle.cos(), angle.sin()
    wide = x[..., :dim].float()
    a, b = wide.chunk(2, -1) if neox else wide.unflatten(-1, (half, 2)).unbind(-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    joined = torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
    return torch.cat((joined.to(x.dtype), x[..., dim:]), -1)


@compiled
def block_attention(q, context, block, masks, scale):
    """Softmax over context (keys, values [R, S, K, D]) and own block ([R, A, g, K, D]) for q [R, A, g, H, D].

    ``masks``: context bool [R, A, g or 1, S], block bool [g, g]; every row sees itself.
    """
    groups = context[0].shape[2]
    shape = q.shape[:3]
    q = (q * scale).unflatten(3, (groups, -1)).permute(0, 3, 4, 1, 2, 5)  # [R, K, G, A, g, D]
    far = torch.einsum("rkgabd,rskd->rkgabs", q, context[0]).float()
    near = torch.einsum("rkgabd,rackd->rkgabc", q, block[0]).float()
    far = far.masked_fill(~masks[0][:, None, None], float("-inf"))
    near = near.masked_fill(~masks[1], float("-inf"))
    weights = torch.cat((far, near), -1).softmax(-1).to(q.dtype)
    size = context[0].shape[1]
    out = torch.einsum("rkgabs,rskv->rkgabv", weights[..., :size], context[1])
    out = out + torch.einsum("rkgabc,rackv->rkgabv", weights[..., size:], block[1])
    return out.permute(0, 3, 4, 1, 2, 5).reshape(*shape, q.shape[1] * q.shape[2], -1)


def initial_tensors(config: DSparkConfig, seed: int) -> dict[str, torch.Tensor]:
    """First weights: norms one, 1/sqrt(fan in) for matrices, small residual outputs, W2 and confidence zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in draft_tensors(config).items():
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensors[name] = torch.ones(spec.shape)
        elif name.startswith("confidence_head") or name.endswith(("markov_w2.weight", "bias")):
            tensors[name] = torch.zeros(spec.shape)
        else:
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 if small else spec.shape[-1] ** -0.5
            tensors[name] = torch.randn(spec.shape, generator=generator) * std
    return tensors


class Drafter:
    """Parameters fp32 under their public names; activations in the target's dtype.

    Embedding and output head are the target's, frozen: ``embedding`` and ``head`` [V, d].
    """

    def __init__(self, config: DSparkConfig, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, head):
        self.config, self.embedding, self.head = config, embedding, head
        self.params = {name: nn.Parameter(value.float().to(embedding.device)) for name, value in tensors.items()}
        self.eps = config.rms_norm_eps

    def _weight(self, layer: int, leaf: str) -> torch.Tensor:
        return self.params[f"layers.{layer}.{leaf}.weight"]

    def keys_values(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., d] at positions [...] -> keys and values [..., K, D]."""
        shape = self.config.attention
        if isinstance(shape, LatentShape):
            both = linear(x, self._weight(layer, "self_attn.kv_a_proj_with_mqa"))
            latent, key = both.split((shape.latent, shape.rope), -1)
            latent = rms_norm(latent, self._weight(layer, "self_attn.kv_a_layernorm"), self.eps)
            wide = linear(latent, self._weight(layer, "self_attn.kv_b_proj")).unflatten(-1, (shape.heads, -1))
            nope, value = wide.split((shape.nope, shape.v_dim), -1)
            key = rotate(key.unsqueeze(-2), positions, self.config).expand(*nope.shape[:-1], -1)
            return torch.cat((nope, key), -1), value
        pair = (linear(x, self._weight(layer, f"self_attn.{leaf}_proj")) for leaf in "kv")
        key, value = (part.unflatten(-1, (shape.kv_heads, -1)) for part in pair)
        key = rms_norm(key, self._weight(layer, "self_attn.k_norm"), self.eps)
        return rotate(key, positions, self.config), value

    def queries(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., d] -> [..., H, D]."""
        shape = self.config.attention
        q = linear(x, self._weight(layer, "self_attn.q_proj")).unflatten(-1, (shape.heads, -1))
        if isinstance(shape, LatentShape):
            return torch.cat((q[..., : shape.nope], rotate(q[..., shape.nope :], positions, self.config)), -1)
        return rotate(rms_norm(q, self._weight(layer, "self_attn.q_norm"), self.eps), positions, self.config)

    def masks(self, layer: int, blocks: Blocks, rows_positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's block rows see: of the context [R, A, 1 or g, S], of their block [g, g]."""
        causal, window = self.config.layers[layer]
        count = blocks.positions.shape[-1]
        own = torch.ones(count, count, dtype=torch.bool, device=blocks.index.device)
        far = blocks.visible.unsqueeze(2)
        if causal:
            own = own.tril()
        if window is not None:
            own = own.triu(1 - window)
            far = far & (rows_positions[:, None, None] > blocks.positions.unsqueeze(-1) - window)
        return far, own

    def attend(self, layer: int, x: torch.Tensor, context, blocks: Blocks, positions: torch.Tensor) -> torch.Tensor:
        """x [R, A, g, d] after the norm, ``context`` the projected features' keys and values -> [R, A, g, d]."""
        q = self.queries(layer, x, blocks.positions)
        block = self.keys_values(layer, x, blocks.positions)
        out = block_attention(q, context, block, self.masks(layer, blocks, positions), q.shape[-1] ** -0.5)
        if isinstance(self.config.attention, LatentShape):
            gate = torch.sigmoid(linear(x, self._weight(layer, "self_attn.g_proj")).float()).to(x.dtype)
            out = out * gate.unsqueeze(-1)
        return linear(out.flatten(-2), self._weight(layer, "self_attn.o_proj"))

    def hidden(self, features: Features, anchors: Anchors) -> torch.Tensor:
        """Outputs of the rows that predict drafts, [R, A, block_size, d]."""
        config, rows = self.config, features.rows
        blocks = make_blocks(features, anchors, config.block_rows)
        context = linear(features.taps, self.params["fc.weight"])
        context = rms_norm(context, self.params["hidden_norm.weight"], self.eps)
        ids = torch.full(blocks.positions.shape, config.mask_token_id, device=context.device)
        ids[..., 0] = rows.tokens.gather(1, anchors.index)
        x = F.embedding(ids, self.embedding).to(context.dtype)
        for layer in range(config.num_hidden_layers):
            normed = rms_norm(x, self._weight(layer, "input_layernorm"), self.eps)
            seen = self.keys_values(layer, context, rows.positions)
            x = x + self.attend(layer, normed, seen, blocks, rows.positions)
            normed = rms_norm(x, self._weight(layer, "post_attention_layernorm"), self.eps)
            gate, up = (linear(normed, self._weight(layer, f"mlp.{leaf}_proj")) for leaf in ("gate", "up"))
            x = x + linear(swiglu(gate, up, None), self._weight(layer, "mlp.down_proj"))
        x = rms_norm(x, self.params["norm.weight"], self.eps)
        return x[:, :, config.block_rows - config.block_size :]
