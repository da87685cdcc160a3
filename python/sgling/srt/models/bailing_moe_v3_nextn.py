"""NEXTN (MTP) layer of Ling-3.0: drafts the token after next from the target's hidden state and the next token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgling.srt.config.model_config import ModelConfig
from sgling.srt.core.forward_batch import ForwardBatch
from sgling.srt.layers.attention.base import AttentionContext
from sgling.srt.layers.draft_head import DraftHead
from sgling.srt.layers.linear import ReplicatedLinear
from sgling.srt.layers.norm import RMSNorm
from sgling.srt.layers.weights import WeightSource
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling.srt.models.bailing_moe_v3 import BailingMoeV3ForCausalLM, DecoderLayer
from sgling_kernel.logits import best_of_product
from sgling_kernel.relay import take_accepted


class BailingMoeV3ForCausalLMNextN:
    """One gated-MLA + MoE layer behind ``eh_proj`` (docs/ling3.md §3.6); embedding and head are the target's storage.

    Row at position p takes the embedding of token p + 1 and the hidden state of position p; its output is both the
    logits input for token p + 2 and the hidden state of the next chained draft. Its KV lies at slot p of ``draft_kv``.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, target: BailingMoeV3ForCausalLM):
        layer_id = config.nextn_layer_id
        prefix = f"model.layers.{layer_id}"
        self.config = config
        self.attn_backend = target.attn_backend.full
        self.embed_tokens = target.embed_tokens
        self.logits_processor = target.logits_processor
        self.draft_head: DraftHead | None = None
        self.enorm = RMSNorm(source, f"{prefix}.enorm.weight", config.rms_norm_eps)
        self.hnorm = RMSNorm(source, f"{prefix}.hnorm.weight", config.rms_norm_eps)
        self.eh_proj = ReplicatedLinear(source, f"{prefix}.eh_proj.weight")
        self.layer = DecoderLayer(source, config, layer_id, target.rotary, (self.attn_backend, None))
        self.final_layernorm = RMSNorm(source, f"{prefix}.final_layernorm.weight", config.rms_norm_eps)

    @property
    def vocab_range(self) -> tuple[int, int]:
        """(first token id, number of ids) of this rank's logits."""
        return self.logits_processor.vocab_range

    def use_token_map(self, token_ids: Sequence[int]) -> None:
        """Draft only these tokens (ascending ids of the whole vocabulary), through a head of their rows."""
        self.draft_head = DraftHead(self.logits_processor, token_ids)

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Token id of each column of :meth:`logits`, int64; None: the columns are ``vocab_range``."""
        return None if self.draft_head is None else self.draft_head.ids

    def forward(
        self,
        batch: ForwardBatch,
        hidden_in: torch.Tensor,
        pools: MemoryPools,
        accept_lens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layer over the rows of a draft batch.

        Args:
            batch: a DRAFT_* mode; ``input_ids`` are the tokens one position ahead.
            hidden_in: [N, H], the target's hidden state after its final norm, or this layer's previous output.
            pools: only ``draft_kv`` and ``req_to_token`` are used.
            accept_lens: int64 [bs]: only the last accepted row of each window is wanted, the others leave their KV.

        Returns:
            [N, H] after ``final_layernorm``, or [bs, H] under ``accept_lens``.

        Raises:
            ValueError: pools without a draft cache.
        """
        if pools.draft_kv is None:
            raise ValueError("the NEXTN layer needs pools with a draft KV cache")
        mla = self.attn_backend.init_forward_metadata_in_graph(batch, pools)
        context = AttentionContext(batch=batch, kv=pools.draft_kv, mla=mla, kda=())
        pair = self.embed_tokens.forward_pair(batch.input_ids, self.enorm, hidden_in, self.hnorm)
        residual = self.eh_proj.forward(pair)
        hidden = self.layer.input_layernorm.forward(residual)
        if accept_lens is None:
            hidden, residual = self.layer.forward(hidden, residual, context)
        elif (
            self.attn_backend.needs_cpu_seq_lens
        ):  # a host plan cannot follow accept lengths: attend all rows, then take
            hidden, residual = self.layer.forward(hidden, residual, context)
            hidden, residual = take_accepted((hidden, residual), accept_lens, batch.width)
        else:
            hidden, residual = self.layer.forward_accepted(hidden, residual, context, accept_lens)
        return self.final_layernorm.forward_add(hidden, residual)[0]

    def best_token(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Token id of the best of :meth:`logits` into ``out`` int64 [N] (may be strided); for a whole vocabulary."""
        head = self.draft_head or self.logits_processor
        best_of_product(hidden, head.weight, self.vocab_range[0], out, self.draft_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] of this layer -> fp32 [N, V_local] over ``vocab_range``, or [N, C] over ``draft_ids``."""
        return (self.draft_head or self.logits_processor).forward(hidden)
