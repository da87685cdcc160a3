"""Ling-3.0 target model: KDA and gated MLA layers, dense then MoE feed-forward, vocabulary-parallel head."""

from __future__ import annotations

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.core.forward_batch import ForwardBatch, ModelOutput
from sgling.srt.layers.attention.base import AttentionContext
from sgling.srt.layers.attention.hybrid import HybridLinearAttnBackend
from sgling.srt.layers.attention.kda import KDAAttention, KDAAttnBackend
from sgling.srt.layers.attention.mla import MLAAttention, MLAAttnBackend
from sgling.srt.layers.embedding import VocabParallelEmbedding
from sgling.srt.layers.logits import LogitsProcessor
from sgling.srt.layers.moe import DenseMLP, SparseMoE
from sgling.srt.layers.norm import RMSNorm
from sgling.srt.layers.rotary import RotaryEmbedding
from sgling.srt.layers.weights import WeightSource
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling_kernel.moe import ExpertOutputs


class DecoderLayer:
    """One layer with a deferred residual: each norm first adds the previous sublayer's output to the stream."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        backends: tuple[MLAAttnBackend, KDAAttnBackend | None],
    ):
        prefix = f"model.layers.{layer_id}"
        mla_backend, kda_backend = backends
        self.input_layernorm = RMSNorm(source, f"{prefix}.input_layernorm.weight", config.rms_norm_eps)
        if config.is_mla(layer_id):
            self.attention = MLAAttention(source, f"{prefix}.attention", config, layer_id, (rotary, mla_backend))
        else:
            kda_index = config.kda_layer_ids.index(layer_id)
            self.attention = KDAAttention(source, f"{prefix}.attention", config, kda_index, kda_backend)
        self.post_attention_layernorm = RMSNorm(
            source, f"{prefix}.post_attention_layernorm.weight", config.rms_norm_eps
        )
        if config.is_moe(layer_id):
            self.mlp = SparseMoE(source, f"{prefix}.mlp", config, layer_id)
        else:
            self.mlp = DenseMLP(source, f"{prefix}.mlp")

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, context: AttentionContext
    ) -> tuple[torch.Tensor | ExpertOutputs, torch.Tensor]:
        """Sublayers on a normalised input.

        Args:
            hidden: [N, H], the stream after this layer's input norm.
            residual: [N, H], the stream itself.

        Returns:
            (FFN output, stream before it is added), both [N, H]; the next norm adds them.
        """
        hidden = self.attention.forward(hidden, context)
        return self.mlp.forward_add(hidden, residual, self.post_attention_layernorm)

    def forward_accepted(
        self, hidden: torch.Tensor, residual: torch.Tensor, context: AttentionContext, accept_lens: torch.Tensor
    ) -> tuple[torch.Tensor | ExpertOutputs, torch.Tensor]:
        """:meth:`forward` of the last accepted row of each window alone; the cache gets all rows. MLA layers only.

        ``accept_lens`` int64 [bs] -> both [bs, H].
        """
        hidden, residual = self.attention.forward_accepted(hidden, residual, context, accept_lens)
        return self.mlp.forward_add(hidden, residual, self.post_attention_layernorm)


class BailingMoeV3ForCausalLM:
    """The target. Built from a weight source, it holds one rank's shards.

    Attributes:
        tap_layers: layers whose output stream a forward returns side by side (-1: the embedding); DSpark features.
        attn_backend: the hybrid backend; its ``needs_cpu_seq_lens`` is False.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, tap_layers: tuple[int, ...] = ()):
        _check_taps(tap_layers, config.num_hidden_layers)
        self.config = config
        self.tap_layers = tap_layers
        self.rotary = RotaryEmbedding(config, source.device)
        self.attn_backend = HybridLinearAttnBackend(MLAAttnBackend(config.softmax_scale), KDAAttnBackend())
        backends = (self.attn_backend.full, self.attn_backend.linear)
        self.embed_tokens = VocabParallelEmbedding(source, "model.word_embeddings.weight", config.vocab_size)
        self.layers = [
            DecoderLayer(source, config, layer_id, self.rotary, backends)
            for layer_id in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(source, "model.norm.weight", config.rms_norm_eps)
        tied = config.tie_word_embeddings
        head = self.embed_tokens.weight if tied else source.shard("lm_head.weight", dim=0)
        self.logits_processor = LogitsProcessor(head, source.parallel, config.vocab_size)

    def use_full_attention(self, backend: MLAAttnBackend) -> None:
        """Replace how MLA layers attend."""
        self.attn_backend = HybridLinearAttnBackend(backend, self.attn_backend.linear)
        for layer_id in self.config.mla_layer_ids:
            self.layers[layer_id].attention.backend = backend

    @property
    def vocab_range(self) -> tuple[int, int]:
        """(first token id, number of ids) of this rank's logits."""
        return self.logits_processor.vocab_range

    def forward(self, batch: ForwardBatch, pools: MemoryPools) -> ModelOutput:
        """Run the rows of a batch; caches change as ``batch.mode`` says.

        Returns:
            Hidden [N, H] after the final norm, and taps [N, len(tap_layers) * H] (None without tap layers).
        """
        context = self.attn_backend.init_forward_metadata_in_graph(batch, pools)
        residual, hidden = self.embed_tokens.forward_norm(batch.input_ids, self.layers[0].input_layernorm)
        taps = [residual] if -1 in self.tap_layers else []
        norms = [layer.input_layernorm for layer in self.layers[1:]] + [self.norm]
        for layer_id, (layer, next_norm) in enumerate(zip(self.layers, norms, strict=True)):
            hidden, residual = layer.forward(hidden, residual, context)
            hidden, residual = next_norm.forward_add(hidden, residual)
            if layer_id in self.tap_layers:
                taps.append(residual)
        return ModelOutput(hidden=hidden, taps=torch.cat(taps, dim=-1) if taps else None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] after the final norm -> fp32 [N, V_local] over ``vocab_range``."""
        return self.logits_processor.forward(hidden)


def _check_taps(tap_layers: tuple[int, ...], num_layers: int) -> None:
    """The last layer is no tap: drafters are trained on streams that a further norm and layer still read."""
    ordered = sorted(set(tap_layers))
    if list(tap_layers) != ordered or any(not -1 <= layer < num_layers - 1 for layer in tap_layers):
        raise ValueError(f"tap_layers {tap_layers} must increase strictly within -1 .. {num_layers - 2}")
