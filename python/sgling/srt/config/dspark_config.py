"""Shape of a DSpark drafter, read from its config.json (docs/dspark.md §1.7); loud on what is missing or out of range.

Keys may lie at the top, under ``dflash_config`` or under ``dspark_config``; the latter wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sgling.srt.config.dspark_config_readers import (
    read_attention,
    read_flag,
    read_layers,
    read_markov,
    read_mask_token,
    read_rope,
    read_section,
    read_target_layers,
)
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.model_config_readers import (
    read_above_zero,
    read_json,
    read_layer_count,
    read_names,
    read_positive,
)

ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")
MAX_BLOCK_SIZE = 16


class DenseShape(NamedTuple):
    """Grouped-query attention with an RMS norm on every query and key head.

    Attributes:
        heads, kv_heads: query heads and key/value heads.
        head_dim: width of a query, key and value head.
    """

    heads: int
    kv_heads: int
    head_dim: int


class LatentShape(NamedTuple):
    """Ling's gated MLA: keys and values of all heads come from one latent and one shared rotated key."""

    heads: int
    latent: int
    nope: int
    rope: int
    v_dim: int


class RopeShape(NamedTuple):
    """Rotary embedding of queries and keys.

    Attributes:
        theta: base.
        dim: rotated leading dimensions of a dense head, or the rotary part of an MLA head.
        neox: pairs are (i, i + dim/2); else interleaved (2i, 2i + 1).
    """

    theta: float
    dim: int
    neox: bool


class LayerAttention(NamedTuple):
    """What a block row of one layer sees besides the context before the block.

    Attributes:
        causal: only block rows up to itself; else the whole block.
        window: at most this many newest positions up to and including itself, None = all.
    """

    causal: bool
    window: int | None


@dataclass(frozen=True)
class DSparkConfig:
    """One drafter.

    Attributes:
        architecture: class name of config.json.
        attention: dense (grouped-query) or Ling's latent attention.
        rope: rotary style.
        layers: visibility of each layer.
        block_size: drafts per block the drafter was trained for (gamma).
        sample_from_anchor: row 0 predicts draft 1; else a block has one row more and row 0's output is unused.
        target_layer_ids: target layers whose output streams are fused (-1: the embedding).
        mask_token_id: input id of all block rows but the anchor.
        markov_rank, markov_head_type: "vanilla", "gated" or "rnn"; rank 0 and "none" without a Markov head.
        confidence, confidence_with_markov: whether there is a confidence head, and whether it reads w1 too.
        num_target_layers: layers of the target it was trained for, None when the file does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention: DenseShape | LatentShape
    rope: RopeShape
    layers: tuple[LayerAttention, ...]
    block_size: int
    sample_from_anchor: bool
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int
    markov_head_type: str
    confidence: bool
    confidence_with_markov: bool
    num_target_layers: int | None

    @classmethod
    def from_dir(cls, directory: str | Path) -> DSparkConfig:
        """Read ``config.json``; raises :class:`ModelConfigError` naming file or key."""
        return cls.from_dict(read_json(Path(directory) / "config.json"))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DSparkConfig:
        """Build from the contents of config.json; raises :class:`ModelConfigError`."""
        raw = {**config, **read_section(config, "dflash_config"), **read_section(config, "dspark_config")}
        num_layers = read_layer_count(raw)
        attention = read_attention(raw)
        rank, head_type = read_markov(raw)
        confidence = read_flag(raw, "enable_confidence_head", False)
        drafter = cls(
            architecture=_read_architecture(raw),
            rms_norm_eps=read_above_zero(raw, "rms_norm_eps", 1e-6),
            attention=_shape(attention),
            rope=RopeShape(*read_rope(raw, attention)),
            layers=tuple(LayerAttention(*layer) for layer in read_layers(raw, num_layers)),
            num_hidden_layers=num_layers,
            sample_from_anchor=read_flag(raw, "sample_from_anchor", True),
            target_layer_ids=read_target_layers(raw),
            mask_token_id=read_mask_token(raw),
            markov_rank=rank,
            markov_head_type=head_type,
            confidence=confidence,
            confidence_with_markov=confidence and read_flag(raw, "confidence_head_with_markov", False),
            num_target_layers=None if raw.get("num_target_layers") is None else read_positive(raw, "num_target_layers"),
            **{key: read_positive(raw, key) for key in _SIZES},
        )
        if drafter.block_size > MAX_BLOCK_SIZE:
            raise ModelConfigError(f"config.json: block_size={drafter.block_size}: at most {MAX_BLOCK_SIZE} is built")
        if drafter.confidence_with_markov and not rank:
            raise ModelConfigError("config.json: confidence_head_with_markov=True: needs a Markov head (markov_rank)")
        return drafter

    @property
    def block_rows(self) -> int:
        """Query rows of one block forward."""
        return self.block_size + (0 if self.sample_from_anchor else 1)

    @property
    def kv_row_dim(self) -> int:
        """Values one token keeps per layer over all ranks (dense) or on every rank (latent)."""
        if isinstance(self.attention, LatentShape):
            return self.attention.latent + self.attention.rope
        return 2 * self.attention.kv_heads * self.attention.head_dim

    def local_kv_row_dim(self, tp_size: int) -> int:
        """Values one token keeps per layer on one rank: dense heads are sharded, the latent is replicated."""
        return self.kv_row_dim if isinstance(self.attention, LatentShape) else self.kv_row_dim // tp_size

    def check_target(self, target: ModelConfig, tp_size: int) -> None:
        """Refuse a drafter that cannot sit on this target (shared embedding and head, tapped layers, tensor parallel).

        Raises:
            ModelConfigError: naming the key and both values.
        """
        for key in ("vocab_size", "hidden_size"):
            if getattr(self, key) != getattr(target, key):
                raise ModelConfigError(f"drafter {key}={getattr(self, key)}: the target has {getattr(target, key)}")
        layers = target.num_hidden_layers
        if self.num_target_layers not in (None, layers):
            raise ModelConfigError(f"drafter num_target_layers={self.num_target_layers}: the target has {layers}")
        if self.target_layer_ids[-1] > layers - 2:
            raise ModelConfigError(
                f"drafter target_layer_ids={list(self.target_layer_ids)}: the last usable layer is {layers - 2}"
            )
        shards = {"heads": self.attention.heads, "intermediate_size": self.intermediate_size}
        if isinstance(self.attention, DenseShape):
            shards["kv_heads"] = self.attention.kv_heads
        for name, size in shards.items():
            if size % tp_size:
                raise ModelConfigError(f"drafter {name}={size} cannot be split over tp_size={tp_size}")


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "block_size")


def _shape(sizes: dict[str, int]) -> DenseShape | LatentShape:
    return LatentShape(**sizes) if "latent" in sizes else DenseShape(**sizes)


def _read_architecture(raw: Mapping[str, Any]) -> str:
    names = read_names(raw, "architectures")
    if not names or names[0] not in ARCHITECTURES:
        raise ModelConfigError(f"config.json: architectures={names!r}: DSpark drafters are {', '.join(ARCHITECTURES)}")
    return names[0]
