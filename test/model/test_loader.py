"""Loading: what is refused (missing shard, stray file, truncation, extra layers), what is ignored, dtypes, tying."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.driver import load
from model.tiny_model import random_tensors, tiny_config, write_tensors, write_tiny_checkpoint
from sgling.srt.config.load_config import LoadConfig
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.model_loader import ModelLoadError
from sgling.srt.model_loader.footprint import rank_weight_bytes

Q_PROJ = "model.layers.3.attention.q_proj.weight"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("sharded"), num_shards=3)


@pytest.fixture
def copy(sharded, tmp_path):
    """A private copy of the three-shard checkpoint."""
    return shutil.copytree(sharded, tmp_path / "copy")


def _index(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def _edit(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def _edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _embedding(loaded):
    return loaded.target.embed_tokens.weight


def test_shards_load_and_report(sharded):
    loaded = load(sharded, with_nextn=True)
    assert loaded.report.ignored == ()
    assert loaded.report.num_tensors == len(_index(sharded))
    config = ModelConfig.from_dir(sharded)
    assert loaded.report.weight_bytes == rank_weight_bytes(config, 1, torch.float32, with_nextn=True)


def test_missing_shard_is_named(copy):
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(copy)


def test_tensor_missing_from_its_shard_is_named(copy):
    shard = copy / _index(copy)[Q_PROJ]
    _edit(shard, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(ModelLoadError, match=f"{Q_PROJ}.*{shard.name}"):
        load(copy)


def test_tensor_missing_everywhere_is_named(copy):
    shard = copy / _index(copy)[Q_PROJ]
    _edit(shard, lambda tensors: tensors.pop(Q_PROJ))
    (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelLoadError, match=Q_PROJ):
        load(copy)


def test_stray_file_outside_the_index_is_not_read(copy, sharded):
    other = random_tensors(tiny_config(), seed=99)
    save_file(other, copy / "model.safetensors")
    assert torch.equal(_embedding(load(copy)), _embedding(load(sharded)))


def test_without_index_headers_decide(copy, sharded):
    (copy / "model.safetensors.index.json").unlink()
    assert torch.equal(_embedding(load(copy)), _embedding(load(sharded)))


def test_without_index_one_name_in_two_files_is_refused(copy):
    (copy / "model.safetensors.index.json").unlink()
    shutil.copy(copy / "model-00001-of-00003.safetensors", copy / "zz.safetensors")
    with pytest.raises(ModelLoadError, match="both .*model-00001-of-00003.safetensors and .*zz.safetensors"):
        load(copy)


def test_one_shard_alone_is_refused(copy):
    (copy / "model.safetensors.index.json").unlink()
    for shard in sorted(copy.glob("*.safetensors"))[1:]:
        shard.unlink()
    with pytest.raises(ModelLoadError, match="is in none of the checkpoint's files"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_shard_is_named(copy, keep):
    shard = sorted(copy.glob("*.safetensors"))[2]
    content = shard.read_bytes()
    shard.write_bytes(content[:keep])
    with pytest.raises(ModelLoadError, match=shard.name):
        load(copy)


def test_no_weights_at_all(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(ModelLoadError, match="no model.safetensors.index.json"):
        load(tmp_path)


def test_wrong_shape_names_tensor_and_both_shapes(copy):
    shard = copy / _index(copy)[Q_PROJ]
    _edit(shard, lambda tensors: tensors.update({Q_PROJ: torch.zeros(95, 64)}))
    with pytest.raises(ModelLoadError, match=rf"{Q_PROJ}.*\[95, 64\].*\[96, 64\]"):
        load(copy)


def test_unreadable_dtype_is_named(copy):
    shard = copy / _index(copy)[Q_PROJ]
    _edit(shard, lambda tensors: tensors.update({Q_PROJ: torch.zeros(96, 64, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=f"{Q_PROJ}.*I8"):
        load(copy)


def _write(directory, tensors, **overrides):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_config(**overrides)))
    write_tensors(directory, tensors)
    return directory


def test_unused_extra_tensors_are_listed(tmp_path, caplog):
    extra = {
        "model.layers.3.attention.rotary_emb.inv_freq": torch.zeros(4),
        "v_head.weight": torch.zeros(1),
        "model.layers.0.attention.note": torch.zeros(1),
    }
    with caplog.at_level(logging.WARNING):
        report = load(_write(tmp_path, random_tensors(tiny_config(), 0) | extra)).report
    assert report.ignored == tuple(sorted(extra))
    assert "model.layers.0.attention.note" in caplog.text


NO_LIMITS = {"expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None}


@pytest.mark.parametrize(("layers", "message"), [(6, "puts it at layer 6"), (4, "puts it at layer 4")])
def test_layer_count_that_moves_the_nextn_layer_is_refused(copy, layers, message):
    """One more layer would make a trunk layer of the NEXTN layer, whose tensors have the names of an MLA layer."""
    kinds = ["linear_attention"] * 3 + ["full_attention"] * (layers - 3)
    _edit_config(copy, num_hidden_layers=layers, layer_types=kinds, **NO_LIMITS)
    with pytest.raises(ModelLoadError, match=f"eh_proj.*{message}"):
        load(copy)


@pytest.mark.parametrize(
    ("layers", "message"), [(6, "model.layers.5.* is in none"), (4, r"model\.layers\.4\..*layers 0 to 3 only")]
)
def test_layer_count_is_checked_without_a_nextn_layer(tmp_path, layers, message):
    directory = write_tiny_checkpoint(tmp_path, num_nextn_predict_layers=0)
    _edit_config(directory, num_hidden_layers=layers, **NO_LIMITS)
    with pytest.raises(ModelLoadError, match=message):
        load(directory)


def test_experts_beyond_the_config_are_refused(tmp_path):
    extra = {"model.layers.1.mlp.experts.8.up_proj.weight": torch.zeros(24, 64)}
    with pytest.raises(ModelLoadError, match=r"experts\.8\.up_proj.*num_experts=8"):
        load(_write(tmp_path, random_tensors(tiny_config(), 0) | extra))


def test_nextn_layer_is_needed_only_when_used(tmp_path):
    tensors = {k: v for k, v in random_tensors(tiny_config(), 0).items() if not k.startswith("model.layers.5.")}
    directory = _write(tmp_path, tensors)
    assert load(directory).report.ignored == ()
    with pytest.raises(ModelLoadError, match="model.layers.5"):
        load(directory, with_nextn=True)


def test_nextn_layer_is_ignored_without_complaint(sharded, caplog):
    with caplog.at_level(logging.WARNING):
        loaded = load(sharded)
    assert loaded.nextn is None and loaded.report.ignored == () and not caplog.records


def test_nextn_without_a_nextn_layer_in_the_config(tmp_path):
    directory = write_tiny_checkpoint(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers=0"):
        load(directory, with_nextn=True)


def test_nextn_shares_embedding_and_head_storage(sharded):
    loaded = load(sharded, with_nextn=True)
    assert loaded.nextn.embed_tokens.weight.data_ptr() == loaded.target.embed_tokens.weight.data_ptr()
    assert loaded.nextn.logits_processor.weight.data_ptr() == loaded.target.logits_processor.weight.data_ptr()


def test_tied_head_is_the_embedding(tmp_path):
    directory = write_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    target = load(directory).target
    assert target.logits_processor.weight is target.embed_tokens.weight


@pytest.mark.parametrize("name", ["model.layers.5.shared_head.head.weight", "model.layers.5.embed_tokens.weight"])
def test_own_copy_of_a_shared_tensor_must_be_equal(tmp_path, name):
    tensors = random_tensors(tiny_config(), 0)
    twin = tensors["lm_head.weight" if "head" in name else "model.word_embeddings.weight"]
    directory = _write(tmp_path, {**tensors, name: twin.clone()})
    assert load(directory, with_nextn=True).report.ignored == (name,)
    _write(tmp_path, {**tensors, name: twin + 1})
    with pytest.raises(ModelLoadError, match=f"{name}.*differs"):
        load(directory, with_nextn=True)


@pytest.mark.parametrize("held", [torch.float32, torch.float16, torch.bfloat16])
def test_file_dtypes_convert_by_value(tmp_path, held, caplog):
    tensors = {k: v.to(held) for k, v in random_tensors(tiny_config(), 0).items()}
    with caplog.at_level(logging.WARNING):
        target = load(_write(tmp_path, tensors), dtype=torch.bfloat16).target
    narrowing = [record for record in caplog.records if "narrowed" in record.message]
    assert len(narrowing) == (0 if held is torch.bfloat16 else 1)
    assert torch.equal(target.norm.weight, tensors["model.norm.weight"].to(torch.bfloat16))
    kda, moe = target.layers[0].attention, target.layers[1].mlp
    assert {kda.params.conv_weight.dtype, kda.params.a_log.dtype, moe.expert_bias.dtype} == {torch.float32}
    assert kda.in_proj.weight.dtype is torch.bfloat16


def test_dummy_needs_no_weights_and_follows_its_rule(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    loaded = load(tmp_path, with_nextn=True, load_format="dummy")
    target = loaded.target
    assert torch.equal(target.norm.weight, torch.ones(64))
    assert 1.6 < target.embed_tokens.weight.abs().max() <= 1.73
    assert not torch.equal(target.layers[1].attention.in_proj.weight, target.layers[0].attention.in_proj.weight)
    dt_bias = target.layers[0].attention.params.dt_bias
    assert dt_bias.min() >= -2 and dt_bias.max() <= 0
    assert target.layers[1].mlp.experts.w13.abs().max() <= (3 / 64) ** 0.5
    assert torch.equal(target.layers[1].mlp.expert_bias, torch.zeros(8))
    again = load(tmp_path, load_format="dummy").target
    assert torch.equal(again.layers[1].mlp.experts.w13, target.layers[1].mlp.experts.w13)


def test_load_format_is_checked():
    with pytest.raises(ValueError, match="load_format='gguf'"):
        LoadConfig("x", "gguf")
