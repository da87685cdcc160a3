"""Flags: speculative decoding and the rollback of recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

from sgling.srt.config.flags import flag, hint, not_built

_NGRAM = "NGRAM speculation"
_LOSSY = "lossy acceptance"


@dataclass(frozen=True, kw_only=True)
class SpeculativeArgs:
    """What ``spec_config`` resolves."""

    speculative_algorithm: str | None = flag(
        None, "NEXTN (= EAGLE), DSPARK or none; default: NEXTN for an embedded model, else none", "--speculative-algo"
    )
    speculative_draft_model_path: str | None = flag(
        None, "DSPARK: drafter directory or hub id; default: the model's dspark/ folder", "--speculative-draft-model"
    )
    speculative_draft_model_revision: str | None = flag(None, "branch, tag or commit of a hub drafter")
    speculative_draft_load_format: str | None = flag(
        None, "as --load-format, for the drafter; default: the same", choices=("auto", "safetensors", "dummy")
    )
    speculative_num_steps: int | None = flag(None, "draft depth; default 3")
    speculative_eagle_topk: int | None = flag(None, "branches per draft step; 1 is the only one")
    speculative_num_draft_tokens: int | None = flag(None, "verify width with the root token: steps + 1")
    enable_linear_replayssm_spec: bool = flag(False, "roll recurrent states back by replay (the default on a GPU)")
    linear_replayssm_cache_len: int | None = flag(
        None, "ring length of replay: a power of two, at least twice the verify width; default 16, DSPARK: as needed"
    )
    linear_rollback: str | None = flag(
        None, "how recurrent states are rolled back; default replay, on a CPU staged", choices=("replay", "staged")
    )
    speculative_depth: str = flag(
        "fixed",
        "auto = choose the verify width step by step, 1 (no drafts) included, by what was accepted; confidence = for a "
        "single request, by what the DSPARK drafter expects",
        choices=("fixed", "auto", "confidence"),
    )
    speculative_depth_table: str | None = flag(
        None, "step times for auto, written by sgling sweep depth; default: measured at start"
    )
    speculative_token_map: str | None = flag(
        None, "NEXTN: file of the token ids that may be drafted (JSON list or .pt); default: the whole vocabulary"
    )
    speculative_adaptive: bool = flag(False, "upstream's name of --speculative-depth auto")
    speculative_smoke: str = flag(
        "auto",
        "at start, compare the accept length on fixed prompts with the recorded floor; auto = if there is a floor",
        choices=("auto", "on", "off"),
    )


@dataclass(frozen=True, kw_only=True)
class DSparkArgs:
    """Flags of the block drafter."""

    speculative_dspark_block_size: int | None = flag(None, "use only this many drafts of each block; default: all")
    speculative_use_rejection_sampling: bool = flag(
        False, "DSPARK: lossless p/q rejection instead of position-keyed sampled verify"
    )
    speculative_dspark_sps_table_path: str | None = flag(
        None, "JSON of steps per second by verify rows, for compact verify; default: measured at start"
    )
    speculative_dspark_confidence_sts_path: str | None = flag(
        None, "JSON of calibration temperatures (sgling fit-confidence); default: all 1"
    )
    speculative_dspark_align_verify_tokens_to_graph_tier: bool = flag(
        False, "compact verify: spend rows up to the next multiple of the width"
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeHintArgs:
    """Speculative flags that need another drafter, or change nothing here."""

    speculative_draft_model_quantization: str | None = not_built(None, "quantised weights")
    speculative_draft_kv_cache_dtype: str | None = not_built(
        None, "a quantised KV cache", neutral=("auto", "bf16", "bfloat16")
    )
    speculative_draft_window_size: int | None = not_built(None, "windowed draft attention")
    speculative_draft_sink_size: int | None = not_built(None, "windowed draft attention")
    speculative_draft_attention_backend: str | None = hint(None, "every operator picks its kernel by device and shape")
    speculative_moe_runner_backend: str | None = hint(None, "every operator picks its kernel by device and shape")
    speculative_moe_a2a_backend: str | None = not_built(None, "expert parallelism", neutral=("none",))
    speculative_attention_mode: str = hint(
        "prefill", "verify and decode share one attention kernel", choices=("prefill", "decode")
    )
    speculative_accept_threshold_single: float = not_built(1.0, _LOSSY)
    speculative_accept_threshold_acc: float = not_built(1.0, _LOSSY)
    speculative_use_block_verification: bool = not_built(False, "block verification")
    speculative_adaptive_config: str | None = not_built(
        None, "lists of candidate depths; --speculative-depth-table has measured costs"
    )
    speculative_dflash_block_size: int | None = not_built(None, "DFLASH speculation")
    speculative_ngram_min_bfs_breadth: int = not_built(1, _NGRAM)
    speculative_ngram_max_bfs_breadth: int = not_built(10, _NGRAM)
    speculative_ngram_match_type: str = not_built("BFS", _NGRAM)
    speculative_ngram_max_trie_depth: int = not_built(18, _NGRAM)
    speculative_ngram_capacity: int = not_built(10_000_000, _NGRAM)
