"""The exact tensor list of a DSpark checkpoint, from its config alone (docs/dspark.md §1.6), and what one rank holds.

The public Ling drafter sums to 1,363,707,905 values with its copies of embedding and head, which are ignored in favour
of the target's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from sgling.srt.config.dspark_config import DSparkConfig, LatentShape
from sgling.srt.model_loader.checkpoint import StoredTensor
from sgling.srt.model_loader.checks import check_tensor
from sgling.srt.model_loader.errors import ModelLoadError
from sgling.srt.model_loader.inventory import TensorSpec, ffn_tensors

_OPTIONAL_PREFIX = "model."
_TARGETS_OWN = re.compile(r"^(embed_tokens\.weight|lm_head\.weight)$|rotary_emb\.")
_SHARDED = re.compile(
    r"self_attn\.(q|k|v|o|g|kv_b)_proj\.weight$|mlp\.(gate|up|down)_proj\.weight$|markov_head\.markov_w2\.weight$"
)


def draft_tensors(config: DSparkConfig) -> dict[str, TensorSpec]:
    """Name (without the optional ``model.``) -> spec of every tensor a drafter needs."""
    hidden = config.hidden_size
    norm, features = TensorSpec((hidden,)), len(config.target_layer_ids) * hidden
    specs = {"fc.weight": TensorSpec((hidden, features)), "hidden_norm.weight": norm, "norm.weight": norm}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        specs |= {f"{prefix}.input_layernorm.weight": norm, f"{prefix}.post_attention_layernorm.weight": norm}
        specs |= {f"{prefix}.self_attn.{leaf}.weight": spec for leaf, spec in _attention(config).items()}
        specs |= ffn_tensors(f"{prefix}.mlp.", hidden, config.intermediate_size)
    return {**specs, **_heads(config)}


def _heads(config: DSparkConfig) -> dict[str, TensorSpec]:
    hidden, rank = config.hidden_size, config.markov_rank
    specs = {}
    if rank:
        table = TensorSpec((config.vocab_size, rank))
        specs |= {"markov_head.markov_w1.weight": table, "markov_head.markov_w2.weight": table}
    shapes = {"gated": ("gate_proj", (rank, hidden + rank)), "rnn": ("joint_proj", (3 * rank, 2 * rank + hidden))}
    if config.markov_head_type in shapes:
        leaf, shape = shapes[config.markov_head_type]
        specs[f"markov_head.{leaf}.weight"] = TensorSpec(shape)
        specs[f"markov_head.{leaf}.bias"] = TensorSpec(shape[:1])
    if config.confidence:
        width = hidden + (rank if config.confidence_with_markov else 0)
        specs["confidence_head.proj.weight"] = TensorSpec((1, width))
        specs["confidence_head.proj.bias"] = TensorSpec((1,))
    return specs


def draft_weight_bytes(config: DSparkConfig, tp_size: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's drafter in the serving dtype (the confidence head is fp32)."""
    total = 0
    for name, spec in draft_tensors(config).items():
        itemsize = 4 if name.startswith("confidence_head.") else dtype.itemsize
        total += spec.numel * itemsize // (tp_size if _SHARDED.search(name) else 1)
    return total


def draft_copy_bytes(config: DSparkConfig, tp_size: int, dtype: torch.dtype) -> int:
    """Bytes of the second copy that one rank keeps of its key and value weights (layers/attention/block_kv.py)."""
    return config.num_hidden_layers * config.local_kv_row_dim(tp_size) * config.hidden_size * dtype.itemsize


def check_draft_inventory(
    stored: Mapping[str, StoredTensor], config: DSparkConfig
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """(stored tensors under plain names, names of the files that are left unread).

    Raises:
        ModelLoadError: a tensor is missing, of the wrong shape, or belongs to a drafter other than the config's.
    """
    plain = {name.removeprefix(_OPTIONAL_PREFIX): tensor for name, tensor in stored.items()}
    if len(plain) != len(stored):
        raise ModelLoadError("the drafter holds a tensor both with and without the prefix 'model.'")
    expected = draft_tensors(config)
    for name, spec in expected.items():
        check_tensor(name, spec, plain.get(name))
    ignored = []
    for name, tensor in plain.items():
        if name in expected:
            continue
        unused_head = name.startswith("confidence_head.") and not config.confidence
        if not (_TARGETS_OWN.search(name) or unused_head):
            raise ModelLoadError(f"tensor {name} in {tensor.file}: the drafter's config does not account for it")
        ignored.append(name)
    return plain, tuple(sorted(ignored))


def _attention(config: DSparkConfig) -> dict[str, TensorSpec]:
    hidden, shape = config.hidden_size, config.attention
    if isinstance(shape, LatentShape):
        return {
            "q_proj": TensorSpec((shape.heads * (shape.nope + shape.rope), hidden)),
            "kv_a_proj_with_mqa": TensorSpec((shape.latent + shape.rope, hidden)),
            "kv_a_layernorm": TensorSpec((shape.latent,)),
            "kv_b_proj": TensorSpec((shape.heads * (shape.nope + shape.v_dim), shape.latent)),
            "g_proj": TensorSpec((shape.heads, hidden)),
            "o_proj": TensorSpec((hidden, shape.heads * shape.v_dim)),
        }
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    head_norm = TensorSpec((shape.head_dim,))
    return {
        "q_proj": TensorSpec((queries, hidden)),
        "k_proj": TensorSpec((keys, hidden)),
        "v_proj": TensorSpec((keys, hidden)),
        "o_proj": TensorSpec((hidden, queries)),
        "q_norm": head_norm,
        "k_norm": head_norm,
    }
