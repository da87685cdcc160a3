"""config.json of a drafter to be trained, from flags and target; first weights, or those of a drafter to go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sgling.srt.config.dspark_config import DSparkConfig
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.model_config_readers import read_json
from sgling.srt.config.train_draft_args import TrainDraftArgs
from sgling.srt.model_loader.checkpoint import stored_tensors
from sgling.srt.model_loader.draft_inventory import check_draft_inventory, draft_tensors

from .drafter import initial_tensors
from .target import default_taps
from .text_format import TextFormat


def mask_token(args: TrainDraftArgs, text: TextFormat) -> int:
    """Id that fills a block; raises ServerArgsError when the tokenizer lacks it."""
    found = text.tokenizer.token_to_id(args.mask_token)
    if found is None:
        raise ServerArgsError(f"--mask-token {args.mask_token}: the tokenizer of {text.directory} has no such token")
    return found


def attention_keys(args: TrainDraftArgs, text: TextFormat) -> dict[str, Any]:
    """Sizes of the attention: the target's head geometry."""
    config = text.config
    keys: dict[str, Any] = {"num_attention_heads": config.num_attention_heads}
    if args.attention == "mla":
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return keys | {name: getattr(config, name) for name in names}
    keys |= {"num_key_value_heads": args.kv_heads or config.num_attention_heads, "head_dim": config.head_dim}
    return keys | ({} if args.rope_dim is None else {"rope_dim": args.rope_dim})


def drafter_config(args: TrainDraftArgs, text: TextFormat) -> dict[str, Any]:
    """The public config.json (docs/dspark.md §1.7). ``max_position_embeddings`` is what is trained: a row."""
    config, has_markov = text.config, args.markov_type != "none"
    return {
        "architectures": ["LingDSparkModel"],
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": args.layers,
        "intermediate_size": args.mlp,
        "hidden_act": "silu",
        **attention_keys(args, text),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "rope_is_neox_style": args.rope_style == "neox",
        "max_position_embeddings": args.row,
        "num_target_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "dspark_config": {
            "block_size": args.block_size,
            "target_layer_ids": list(args.taps or default_taps(config)),
            "mask_token_id": mask_token(args, text),
            "markov_rank": args.markov_rank if has_markov else 0,
            "markov_head_type": args.markov_type if has_markov else None,
            "enable_confidence_head": not args.no_confidence,
            "confidence_head_with_markov": has_markov and not args.no_confidence,
        },
    }


def read_shape(args: TrainDraftArgs, text: TextFormat) -> tuple[dict[str, Any], DSparkConfig]:
    """(config.json, its meaning), of ``--init`` or of the flags.

    Raises ModelConfigError when it does not fit the target.
    """
    raw = read_json(args.init / "config.json") if args.init else drafter_config(args, text)
    config = DSparkConfig.from_dict(raw)
    config.check_target(text.config, tp_size=1)
    return raw, config


def first_tensors(args: TrainDraftArgs, config: DSparkConfig) -> dict[str, torch.Tensor]:
    """Weights to start from; raises ModelLoadError when those of ``--init`` do not fit their config."""
    if args.init is None:
        return initial_tensors(config, args.seed)
    stored, _ = check_draft_inventory(stored_tensors(Path(args.init)), config)
    tensors = {}
    for name in draft_tensors(config):
        with safe_open(str(stored[name].file), "pt") as file:
            tensors[name] = file.get_tensor(stored[name].key)
    return tensors
