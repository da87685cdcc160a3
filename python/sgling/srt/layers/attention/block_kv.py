"""Cache rows of a DSpark drafter: keys and values of all layers from one product, for context and for block rows."""

from __future__ import annotations

import torch

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.layers.weights import WeightSource
from sgling_kernel.linear import linear
from sgling_kernel.norm import rms_norm
from sgling_kernel.rotary import apply_rope, apply_rope_neox, rope_table


class BlockRotary:
    """Rotary embedding of the leading ``rope.dim`` dimensions of every head, in the drafter's pair layout."""

    def __init__(self, config: DSparkConfig, positions: int, device: str):
        """``positions``: rows of the table; no position of a forward may reach it."""
        self.dim = config.rope.dim
        self.rotate = apply_rope_neox if config.rope.neox else apply_rope
        self.table = rope_table(positions, self.dim, config.rope.theta, device)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [N, heads, D] at positions int64 [N], same dtype."""
        if self.dim == x.shape[-1]:
            return self.rotate(x, positions, self.table)
        return torch.cat((self.rotate(x[..., : self.dim], positions, self.table), x[..., self.dim :]), dim=-1)


class DenseKeyValues:
    """Rows [normalised, rotated key heads | value heads] of grouped-query layers; heads are sharded over ranks."""

    def __init__(self, source: WeightSource, config: DSparkConfig, rotary: BlockRotary):
        self.rotary, self.eps = rotary, config.rms_norm_eps
        self.head_dim = config.attention.head_dim
        prefixes = [f"layers.{layer}.self_attn" for layer in range(config.num_hidden_layers)]
        self.weight = torch.stack(
            [torch.cat([source.shard(f"{prefix}.{leaf}_proj.weight", dim=0) for leaf in "kv"]) for prefix in prefixes]
        )
        self.norm = torch.stack([source.full(f"{prefix}.k_norm.weight") for prefix in prefixes])

    def rows(self, x: torch.Tensor, positions: torch.Tensor, layers: slice) -> torch.Tensor:
        """x [N, d] at positions int64 [N] -> [layers, N, row] of the given layers."""
        count = len(self.norm[layers])
        kv = linear(x, self.weight[layers].flatten(0, 1)).unflatten(-1, (count, 2, -1, self.head_dim))
        keys = rms_norm(kv[:, :, 0], self.norm[layers].unsqueeze(1), self.eps)
        keys = self.rotary.forward(keys.flatten(1, 2), positions).view_as(keys)
        return torch.cat((keys, kv[:, :, 1]), dim=2).flatten(2).transpose(0, 1)


class LatentKeyValues:
    """Rows [normalised latent | rotated shared key] of MLA layers, the same on every rank."""

    def __init__(self, source: WeightSource, config: DSparkConfig, rotary: BlockRotary):
        self.rotary, self.eps = rotary, config.rms_norm_eps
        self.latent = config.attention.latent
        prefixes = [f"layers.{layer}.self_attn" for layer in range(config.num_hidden_layers)]
        self.weight = torch.stack([source.full(f"{prefix}.kv_a_proj_with_mqa.weight") for prefix in prefixes])
        self.norm = torch.stack([source.full(f"{prefix}.kv_a_layernorm.weight") for prefix in prefixes])

    def rows(self, x: torch.Tensor, positions: torch.Tensor, layers: slice) -> torch.Tensor:
        """x [N, d] at positions int64 [N] -> [layers, N, row] of the given layers."""
        count = len(self.norm[layers])
        kv = linear(x, self.weight[layers].flatten(0, 1)).unflatten(-1, (count, -1))
        latent = rms_norm(kv[..., : self.latent], self.norm[layers], self.eps)
        key = self.rotary.forward(kv[..., self.latent :], positions)
        return torch.cat((latent, key), dim=-1).transpose(0, 1)
