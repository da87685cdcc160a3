"""Cache rows of a DSpark drafter: the keys and values of injected target features, for all layers from one product.

The weights lie twice: stacked over the layers for features, and beside each layer's queries for block rows. Either way
a product reads every weight once.
"""

from __future__ import annotations

import torch

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.layers.weights import WeightSource
from sgling_kernel.block_attention import RowRotary, prepare_heads, prepare_latent
from sgling_kernel.linear import linear, pack_weight
from sgling_kernel.rotary import rope_table


class BlockRotary:
    """Rotary embedding of the leading ``rope.dim`` dimensions of every head, in the drafter's pair layout."""

    def __init__(self, config: DSparkConfig, positions: int, device: str):
        """``positions``: rows of the table; no position of a forward may reach it."""
        self.neox = config.rope.neox
        self.table = rope_table(positions, config.rope.dim, config.rope.theta, device)

    def at(self, positions: torch.Tensor) -> RowRotary:
        """The rotation of rows at ``positions`` int64 [N]."""
        return RowRotary(positions, self.table, self.neox)


class DenseCache:
    """Rows [normalised, rotated key heads | value heads] of grouped-query layers; heads are sharded over ranks.

    Attributes:
        layers: [L, 2 * KVH * D, d], key and value rows of every layer.
        norm: [L, D], weights of the key heads.
    """

    def __init__(self, source: WeightSource, config: DSparkConfig, rotary: BlockRotary):
        self.rotary, self.eps = rotary, config.rms_norm_eps
        prefixes = [f"layers.{layer}.self_attn" for layer in range(config.num_hidden_layers)]
        self.layers = torch.stack(
            [torch.cat([source.shard(f"{prefix}.{leaf}_proj.weight", dim=0) for leaf in "kv"]) for prefix in prefixes]
        )
        self.weight = pack_weight(self.layers.flatten(0, 1))
        self.norm = torch.stack([source.full(f"{prefix}.k_norm.weight") for prefix in prefixes])

    def store(self, x: torch.Tensor, positions: torch.Tensor, locs: torch.Tensor, caches: torch.Tensor) -> None:
        """Features x [N, d] at ``positions`` int64 [N] into ``caches`` [L, slots, row] at ``locs`` int64 [N]."""
        heads = linear(x, self.weight).unflatten(-1, (len(self.norm), -1))
        prepare_heads(heads, (self.norm[0], self.norm, self.eps), self.rotary.at(positions), (caches, locs))


class LatentCache:
    """Rows [normalised latent | rotated shared key] of MLA layers, the same on every rank.

    Attributes:
        layers: [L, rope + latent, d], rows of the shared key before those of the latent.
        norm: [L, latent].
    """

    def __init__(self, source: WeightSource, config: DSparkConfig, rotary: BlockRotary):
        self.rotary, self.eps = rotary, config.rms_norm_eps
        self.rope, latent = config.attention.rope, config.attention.latent
        prefixes = [f"layers.{layer}.self_attn" for layer in range(config.num_hidden_layers)]
        weights = [source.full(f"{prefix}.kv_a_proj_with_mqa.weight") for prefix in prefixes]
        self.layers = torch.stack([torch.cat((weight[latent:], weight[:latent])) for weight in weights])
        self.weight = pack_weight(self.layers.flatten(0, 1))
        self.norm = torch.stack([source.full(f"{prefix}.kv_a_layernorm.weight") for prefix in prefixes])

    def store(self, x: torch.Tensor, positions: torch.Tensor, locs: torch.Tensor, caches: torch.Tensor) -> None:
        """See :meth:`DenseCache.store`."""
        rows = linear(x, self.weight).unflatten(-1, (len(self.norm), -1))
        key, latent = rows[..., None, : self.rope], rows[..., self.rope :]
        prepare_latent(key, latent, (self.norm, self.eps), self.rotary.at(positions), (caches, locs))
