"""ModelConfig: both spellings of config.json, what follows from them, and what is refused."""

from __future__ import annotations

import json

import pytest

from model.published import FLASH, TINY
from model.tiny_model import tiny_config
from sgling.srt.config.model_config import GenerationDefaults, ModelConfig
from sgling.srt.config.model_config_checks import ModelConfigError


def test_flash_derived_facts():
    config = ModelConfig.from_dict(FLASH)
    assert config.mla_layer_ids == (5, 11, 17, 23, 29, 35, 41)
    assert len(config.kda_layer_ids) == 35
    assert config.nextn_layer_id == 42 and config.is_mla(42) and config.is_moe(42)
    assert [config.is_moe(i) for i in (0, 1, 2, 41)] == [False, False, True, True]
    assert config.qk_head_dim == 192 and config.kv_row_dim == 576
    assert config.softmax_scale == pytest.approx(192**-0.5)
    assert config.context_length == 262144
    assert config.eos_token_ids == (156895,) and config.pad_token_id == 156892


def test_flash_clamps_differ_between_routed_and_shared():
    config = ModelConfig.from_dict(FLASH)
    limits = [(config.routed_limit(i), config.shared_limit(i)) for i in (33, 34, 35, 39, 40, 41, 42)]
    assert limits == [(None, None), (None, 5), (4, 5), (4, 5), (4, 7), (4, 7), (None, None)]


def test_tiny_has_a_query_latent_and_no_clamp():
    config = ModelConfig.from_dict(TINY)
    assert config.q_lora_rank == 256
    assert config.mla_layer_ids == (3, 7, 11, 15, 19, 23)
    assert set(config.routed_swiglu_limits + config.shared_swiglu_limits) == {None}
    assert config.num_nextn_predict_layers == 0


def test_transformers_spelling_reads_as_the_native_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    native = ModelConfig.from_dict(tiny_config(expert_swiglu_limit_list=None, share_expert_swiglu_limit_list=None))
    theirs = transformers.BailingHybridConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, kv_lora_rank=32, q_lora_rank=None,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_group=4, topk_group=2, num_experts_per_tok=3,
        num_local_experts=8, first_k_dense_replace=1, max_position_embeddings=2048, layer_group_size=4,
        eos_token_id=2, pad_token_id=1, layer_types=["linear_attention"] * 3 + ["full_attention"] * 2,
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["head_dim"] == 8 and raw["linear_head_dim"] == 16, "the trap this test is about"
    read = ModelConfig.from_dir(tmp_path)
    assert read.head_dim == 16
    differing = {k for k in native.__dict__ if getattr(native, k) != getattr(read, k)}
    assert differing == {"moe_shared_expert_intermediate_size"}  # transformers has no key for it
    assert read.moe_shared_expert_intermediate_size == 24


def test_last_incomplete_group_is_mla():
    assert ModelConfig.from_dict(tiny_config()).layer_types == ("kda", "kda", "kda", "mla", "mla")


def test_from_dir_reads_generation_config_and_overrides(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    generation = {"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = ModelConfig.from_dir(tmp_path, {"max_position_embeddings": 4096})
    assert config.eos_token_ids == (2, 3)
    assert config.generation == GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert config.context_length == 4096


def test_override_replaces_the_other_spelling(tmp_path):
    raw = tiny_config()
    raw["model_max_length"] = raw.pop("max_position_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_dir(tmp_path, {"max_position_embeddings": 512}).context_length == 512


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ("architectures", "LlamaForCausalLM", "BailingMoeV3ForCausalLM")),
        ({"model_type": "llama"}, ("model_type", "llama")),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config", "fp8", "BF16")),
        ({"use_nGPT": True}, ("use_nGPT", "True")),
        ({"up_proj_norm": True}, ("up_proj_norm",)),
        ({"value_norm": True}, ("value_norm",)),
        ({"use_mla_nope": True}, ("use_mla_nope",)),
        ({"no_kda_lora": False}, ("no_kda_lora", "False")),
        ({"use_kda_lora": True}, ("use_kda_lora",)),
        ({"kda_safe_gate": False}, ("kda_safe_gate",)),
        ({"score_function": "softmax"}, ("score_function", "softmax", "sigmoid")),
        ({"mtp_use_kda": True}, ("mtp_use_kda",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ("rope_scaling", "yarn", "not built")),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 6e6}}, ("rope_parameters", "yarn")),
        ({"short_conv_kernel_size": 3}, ("short_conv_kernel_size", "3")),
        ({"num_key_value_heads": 2}, ("num_key_value_heads", "2", "4")),
        ({"hidden_size": None}, ("hidden_size", "missing")),
        ({"hidden_size": -64}, ("hidden_size", "-64")),
        ({"num_experts_per_tok": 5}, ("num_experts_per_tok", "5")),
        ({"n_group": 3}, ("n_group", "3")),
        ({"topk_group": 5}, ("topk_group", "5")),
        ({"expert_swiglu_limit_list": [0, 1]}, ("expert_swiglu_limit_list", "[0, 1]")),
        ({"layer_types": ["full_attention"]}, ("layer_types",)),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}, ("mlp_layer_types",)),
        ({"num_nextn_predict_layers": 2}, ("num_nextn_predict_layers", "2")),
        ({"torch_dtype": "int8"}, ("dtype", "int8")),
        ({"rms_norm_eps": "small"}, ("rms_norm_eps", "small")),
    ],
)
def test_refusals_name_key_and_value(override, words):
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_dict(tiny_config(**override))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("content", ["[]", "{", "null"])
def test_broken_config_file_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match="config.json"):
        ModelConfig.from_dir(tmp_path)


def test_absent_config_file_is_named(tmp_path):
    with pytest.raises(ModelConfigError, match="config.json: file not found"):
        ModelConfig.from_dir(tmp_path)


def test_tp_size_must_divide_every_sharded_dimension():
    config = ModelConfig.from_dict(tiny_config(moe_intermediate_size=26))
    config.check_tp_size(2)
    with pytest.raises(ModelConfigError, match="moe_intermediate_size=26 cannot be split over tp_size=4"):
        config.check_tp_size(4)


@pytest.mark.parametrize(("text", "name"), [("float16", "float16"), ("torch.float32", "float32"), (None, "bfloat16")])
def test_dtype_reading(text, name):
    assert ModelConfig.from_dict(tiny_config(torch_dtype=text)).dtype == name
