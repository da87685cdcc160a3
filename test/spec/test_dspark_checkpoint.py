"""Conformance 14 (docs/dspark.md §8): public names and keys load, everything that does not fit is refused loudly."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.driver import load
from model.published import FLASH
from model.tiny_drafter import MLA, drafter_config, drafter_tensors, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.draft_model import complete_args
from sgling.srt.config.dspark_config import DSparkConfig, RopeShape
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.load_config import LoadConfig
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.config.model_config_checks import ModelConfigError
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.model_executor.memory_plan import kv_bytes_per_token
from sgling.srt.model_loader.draft_inventory import draft_tensors, draft_weight_bytes
from sgling.srt.model_loader.draft_loader import get_drafter
from sgling.srt.model_loader.errors import ModelLoadError

PUBLIC_LING = {
    "architectures": ["LingDSparkModel"], "vocab_size": 157184, "hidden_size": 2560, "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 6144,
    "rms_norm_eps": 1e-6, "rope_theta": 6e6, "max_position_embeddings": 262144, "block_size": 8,
    "num_target_layers": 42, "target_layer_ids": [1, 11, 23, 29, 35], "mask_token_id": 157183, "markov_rank": 256,
    "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(target_dir):
    return load(target_dir, tap_layers=(0, 2, 3)).target


def read(directory):
    return DSparkConfig.from_dir(directory)


def get(directory, target, load_format="auto"):
    return get_drafter(read(directory), LoadConfig(str(directory), load_format), target)


def test_14_public_ling_drafter_sums_to_the_published_count():
    config = DSparkConfig.from_dict(PUBLIC_LING)
    copies = 2 * config.vocab_size * config.hidden_size
    assert sum(math.prod(spec.shape) for spec in draft_tensors(config).values()) + copies == 1_363_707_905
    assert (config.block_size, config.block_rows, config.target_layer_ids) == (8, 8, (1, 11, 23, 29, 35))


def test_14_copies_of_embedding_and_head_are_ignored_and_reported(tmp_path, target):
    drafter, report = get(write_tiny_drafter(tmp_path), target)
    assert report.ignored == ("embed_tokens.weight", "lm_head.weight")
    assert drafter.embed_tokens is target.embed_tokens and drafter.logits_processor is target.logits_processor
    assert report.weight_bytes == draft_weight_bytes(drafter.config, 1, torch.float32)


@pytest.mark.parametrize("overrides", [{}, MLA, {"markov_head_type": "gated"}, {"markov_head_type": "rnn"}])
def test_14_prefix_model_is_optional_and_every_value_is_used(tmp_path, target, overrides):
    config = drafter_config(**overrides)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = drafter_tensors(config)
    save_file({f"model.{name}": value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    drafter, report = get(tmp_path, target)
    assert report.num_tensors == len(tensors) and report.ignored == ()
    assert torch.equal(drafter.markov.w1, tensors["markov_head.markov_w1.weight"].float())
    assert report.weight_bytes == draft_weight_bytes(drafter.config, 1, torch.float32)


def test_14_random_weights_need_only_the_config(tmp_path, target):
    (tmp_path / "config.json").write_text(json.dumps(drafter_config(markov_head_type="rnn", **MLA)))
    assert get(tmp_path, target, "dummy")[0].config.markov_rank == 8


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fc.weight", lambda t: t.pop("fc.weight"), "is in none of"),
        ("layers.1.self_attn.k_norm.weight", lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "is in none of"),
        ("markov_head.markov_w2.weight", lambda t: t.pop("markov_head.markov_w2.weight"), "is in none of"),
        ("confidence_head.proj.bias", lambda t: t.pop("confidence_head.proj.bias"), "is in none of"),
        ("fc.weight", lambda t: t.update({"fc.weight": torch.zeros(64, 128)}), "has shape"),
        ("layers.2.input_layernorm.weight", lambda t: t.update({"layers.2.input_layernorm.weight": torch.ones(64)}),
         "does not account"),
        ("d2t", lambda t: t.update({"d2t": torch.zeros(512)}), "does not account"),
        ("markov_head.gate_proj.bias", lambda t: t.update({"markov_head.gate_proj.bias": torch.zeros(8)}),
         "does not account"),
    ],
)  # fmt: skip
def test_14_tensors_that_do_not_fit_the_config_are_named(tmp_path, target, name, change, message):
    write_tiny_drafter(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ModelLoadError, match=f"{name}.*{message}"):
        get(tmp_path, target)


def test_14_an_unused_confidence_head_is_only_reported(tmp_path, target):
    write_tiny_drafter(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["dspark_config"]["enable_confidence_head"] = False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    drafter, report = get(tmp_path, target)
    assert drafter.confidence is None and "confidence_head.proj.bias" in report.ignored


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"markov_head_type": None}, "markov_head_type=None"),
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm'"),
        ({"mask_token_id": 512}, "mask_token_id=512"),
        ({"mask_token_id": None}, "mask_token_id=None"),
        ({"block_size": 17}, "block_size=17"),
        ({"block_size": 0}, "block_size=0"),
        ({"target_layer_ids": [3, 2]}, "target_layer_ids"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [-2, 1]}, "target_layer_ids"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 16}}, "rope_scaling"),
        ({"rope_theta": None}, "rope_theta"),
        ({"partial_rotary_factor": 0.1}, "rotated dimensions"),
        ({"rope_interleave": True}, "disagree"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"draft_vocab_size": 100}, "draft_vocab_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_14_configs_out_of_range_are_refused_by_key(overrides, message):
    with pytest.raises(ModelConfigError, match=message):
        DSparkConfig.from_dict(drafter_config(**overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 600}, "vocab_size=600: the target has 512"),
        ({"hidden_size": 32}, "hidden_size=32: the target has 64"),
        ({"num_target_layers": 42}, "num_target_layers=42: the target has 5"),
        ({"target_layer_ids": [0, 4]}, "last usable layer is 3"),
    ],
)
def test_14_drafters_of_another_target_are_refused(target, overrides, message):
    with pytest.raises(ModelConfigError, match=message):
        DSparkConfig.from_dict(drafter_config(**overrides)).check_target(target.config, 1)


def test_14_a_target_loaded_with_other_taps_is_refused(target_dir, tmp_path):
    other = load(target_dir, tap_layers=(1, 2)).target
    with pytest.raises(ValueError, match=r"\(0, 2, 3\).*\(1, 2\)"):
        get(write_tiny_drafter(tmp_path), other)


@pytest.mark.parametrize(
    ("overrides", "tp_size", "name"), [({}, 4, "kv_heads"), (MLA, 8, "heads"), ({"intermediate_size": 97}, 2, "inter")]
)
def test_14_tensor_parallel_sizes_that_do_not_divide_are_refused(target, overrides, tp_size, name):
    with pytest.raises(ModelConfigError, match=f"drafter {name}.*tp_size"):
        DSparkConfig.from_dict(drafter_config(**overrides)).check_target(target.config, tp_size)


@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        ({}, RopeShape(10000.0, 16, True)),
        ({"rope_is_neox_style": False}, RopeShape(10000.0, 16, False)),
        ({"rope_is_neox_style": None, "is_neox_style": False}, RopeShape(10000.0, 16, False)),
        ({"rope_is_neox_style": None, "rope_interleave": True}, RopeShape(10000.0, 16, False)),
        ({"rope_is_neox_style": None}, RopeShape(10000.0, 16, True)),
        ({"partial_rotary_factor": 0.5}, RopeShape(10000.0, 8, True)),
        ({"rope_dim": 8}, RopeShape(10000.0, 8, True)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
         RopeShape(5e5, 16, True)),
        (MLA, RopeShape(10000.0, 8, True)),
    ],
)  # fmt: skip
def test_14_both_rope_styles_are_read_from_every_spelling(overrides, rope):
    assert DSparkConfig.from_dict(drafter_config(**overrides)).rope == rope


def test_nested_sections_win_over_the_top_and_dspark_over_dflash():
    raw = {**drafter_config(), "block_size": 2, "dflash_config": {"block_size": 3, "markov_rank": 5}}
    raw["dspark_config"] = {**raw["dspark_config"], "block_size": 6}
    assert DSparkConfig.from_dict(raw).block_size == 6
    del raw["dspark_config"]["block_size"]
    assert DSparkConfig.from_dict(raw).block_size == 3


def args_of(target_dir, **kwargs) -> ServerArgs:
    return ServerArgs.from_kwargs(model_path=str(target_dir), device="cpu", speculative_algorithm="DSPARK", **kwargs)


def test_width_and_ring_come_from_the_drafter(target_dir, tmp_path):
    write_tiny_drafter(tmp_path, block_size=8)
    args = args_of(target_dir, speculative_draft_model_path=str(tmp_path), linear_rollback="replay")
    args = complete_args(args)
    assert (args.spec.width, args.spec.window, args.spec.ring_length, args.spec.topk) == (9, 9, 32, 1)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens, args.linear_replayssm_cache_len) == (
        1,
        9,
        32,
    )
    assert complete_args(args) is args


@pytest.mark.parametrize(("tp_size", "draft_bytes"), [(1, 81920), (4, 20480)])
def test_memory_plan_counts_the_drafters_rows(tp_size, draft_bytes):
    """Public Ling drafter in bf16: 80 KiB per token (§2.12), its heads sharded; the target's own rows are 8064 B."""
    flags = {"speculative_draft_model_path": "d", "tp_size": tp_size, "dtype": "bfloat16"}
    args = args_of("m", **flags).with_drafter(DSparkConfig.from_dict(PUBLIC_LING))
    assert kv_bytes_per_token(ModelConfig.from_dict(FLASH), args) == 8064 + draft_bytes


def test_fewer_drafts_than_trained_keep_the_whole_block(target_dir, tmp_path):
    write_tiny_drafter(tmp_path, block_size=8, sample_from_anchor=False)
    args = args_of(target_dir, speculative_draft_model_path=str(tmp_path), speculative_dspark_block_size=3)
    spec = complete_args(args).spec
    assert (spec.width, spec.drafter.block_rows, spec.window) == (4, 9, 9)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"speculative_dspark_block_size": 5}, "must be 1 to 4"),
        ({"speculative_dspark_block_size": 0}, "must be 1 to 4"),
        ({"speculative_num_draft_tokens": 4}, "must be 5, block size"),
        ({"linear_replayssm_cache_len": 8}, "at least 10, twice the verify width 5"),
    ],
)
def test_flags_that_contradict_the_drafter_are_refused(target_dir, tmp_path, kwargs, message):
    write_tiny_drafter(tmp_path)
    with pytest.raises(ServerArgsError, match=message):
        complete_args(args_of(target_dir, speculative_draft_model_path=str(tmp_path), **kwargs))


def test_a_bundled_drafter_is_found_and_a_missing_one_is_an_error(tmp_path):
    target = write_tiny_checkpoint(tmp_path)
    with pytest.raises(ServerArgsError, match="--speculative-draft-model-path"):
        complete_args(args_of(target))
    write_tiny_drafter(tmp_path / "dspark", block_size=2)
    assert complete_args(args_of(target)).spec.width == 3
