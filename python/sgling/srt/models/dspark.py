"""DSpark drafter: a small stack whose history is projected target features, drafting a whole block at once.

Backbone as docs/dspark.md §1.1 to 1.3; embedding and output head are the target's storage. Its cache holds one entry
per committed token and layer, at the token's own slot; block rows write theirs behind, where injection later overwrites
them.
"""

from __future__ import annotations

import torch

from sgling.srt.config.dspark_config import DSparkConfig, LatentShape
from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.layers.attention.block import BlockAttnBackend, DenseBlockAttention, LatentBlockAttention
from sgling.srt.layers.attention.block_kv import BlockRotary, DenseCache, LatentCache
from sgling.srt.layers.linear import ReplicatedLinear
from sgling.srt.layers.moe import DenseMLP
from sgling.srt.layers.norm import RMSNorm
from sgling.srt.layers.rotary import WINDOW_MARGIN
from sgling.srt.layers.weights import WeightSource
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling.srt.models.bailing_moe_v3 import BailingMoeV3ForCausalLM
from sgling.srt.models.dspark_heads import MARKOV_HEADS, ConfidenceHead, MarkovHead


class DSparkLayer:
    """Norm, block attention, norm, SwiGLU with a deferred residual, as the target's layers."""

    def __init__(
        self,
        source: WeightSource,
        config: DSparkConfig,
        layer_id: int,
        shared: tuple[DenseCache | LatentCache, BlockAttnBackend],
    ):
        prefix = f"layers.{layer_id}"
        attention = LatentBlockAttention if isinstance(config.attention, LatentShape) else DenseBlockAttention
        self.input_layernorm = RMSNorm(source, f"{prefix}.input_layernorm.weight", config.rms_norm_eps)
        self.attention = attention(source, config, layer_id, shared)
        self.post_attention_layernorm = RMSNorm(
            source, f"{prefix}.post_attention_layernorm.weight", config.rms_norm_eps
        )
        self.mlp = DenseMLP(source, f"{prefix}.mlp")


class DSparkDrafter:
    """One rank's drafter.

    Attributes:
        config: its shape.
        markov: Markov head, or None.
        confidence: confidence head, or None.
        attn_backend: how block rows attend; the engine ORs its ``needs_cpu_seq_lens``.
    """

    def __init__(self, source: WeightSource, config: DSparkConfig, target: BailingMoeV3ForCausalLM):
        """Raises ValueError when the target was not loaded with the layers that the drafter taps."""
        if target.tap_layers != config.target_layer_ids:
            raise ValueError(f"the drafter taps {config.target_layer_ids}, the loaded target {target.tap_layers}")
        self.config = config
        self.embed_tokens = target.embed_tokens
        self.logits_processor = target.logits_processor
        self.attn_backend = BlockAttnBackend()
        positions = max(config.max_position_embeddings, target.config.max_position_embeddings) + WINDOW_MARGIN
        rotary = BlockRotary(config, positions, source.device)
        self.fc = ReplicatedLinear(source, "fc.weight")
        self.hidden_norm = RMSNorm(source, "hidden_norm.weight", config.rms_norm_eps)
        cache = LatentCache if isinstance(config.attention, LatentShape) else DenseCache
        self.cache = cache(source, config, rotary)
        shared = (self.cache, self.attn_backend)
        self.layers = [DSparkLayer(source, config, layer, shared) for layer in range(config.num_hidden_layers)]
        self.norm = RMSNorm(source, "norm.weight", config.rms_norm_eps)
        markov = MARKOV_HEADS.get(config.markov_head_type)
        self.markov: MarkovHead | None = markov(source, config) if markov else None
        self.confidence = ConfidenceHead(source, config) if config.confidence else None

    def use_attention(self, backend: BlockAttnBackend) -> None:
        """Replace how block rows attend."""
        self.attn_backend = backend
        for layer in self.layers:
            layer.attention.backend = backend

    @property
    def vocab_range(self) -> tuple[int, int]:
        """(first token id, number of ids) of this rank's logits."""
        return self.logits_processor.vocab_range

    def inject(self, taps: torch.Tensor, positions: torch.Tensor, locs: torch.Tensor, pools: MemoryPools) -> None:
        """Write the cache rows of tokens whose target features are known.

        Args:
            taps: [N, m * H], outputs of the tapped target layers side by side.
            positions, locs: int64 [N], true positions and cache slots (0 drops a row).
        """
        context = self.hidden_norm.forward(self.fc.forward(taps))
        self.cache.store(context, positions, locs, pools.draft_kv.buffer)

    def forward(self, batch: ForwardBatch, pools: MemoryPools) -> torch.Tensor:
        """Backbone over the block rows of a DRAFT_BLOCK batch -> [N, d] after the final norm."""
        context = self.attn_backend.init_forward_metadata_in_graph(batch, pools)
        residual, hidden = self.embed_tokens.forward_norm(batch.input_ids, self.layers[0].input_layernorm)
        norms = [layer.input_layernorm for layer in self.layers[1:]] + [self.norm]
        for layer, next_norm in zip(self.layers, norms, strict=True):
            attended = layer.attention.forward(hidden, pools.draft_kv.buffer, batch, context)
            hidden, residual = layer.post_attention_layernorm.forward_add(attended, residual)
            hidden, residual = next_norm.forward_add(layer.mlp.forward(hidden), residual)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, d] of the backbone -> base logits fp32 [N, V_local], before the Markov head."""
        return self.logits_processor.forward(hidden)
