"""Outside oracle: transformers' BailingHybridForCausalLM on the same weights (it has no NEXTN layer and no clamps).

Every 1-D parameter is redrawn, because norms of one and biases of zero are blind to mistakes. The oracle runs its
recurrent KDA form for prompts too: its chunk form strays from it by up to 2e-4 in these logits, ours by 6e-5.
"""

from __future__ import annotations

import pytest
import torch

from model.driver import Driver, load, prompt_ids
from model.tiny_model import random_tensor
from sgling.srt.model_loader.inventory import TensorSpec

transformers = pytest.importorskip("transformers", minversion="5.24")
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as modeling  # noqa: E402

VOCAB = 512


@pytest.fixture(scope="module", params=[None, 24], ids=["direct-q", "q-latent"])
def pair(request, tmp_path_factory):
    """(transformers model, our driver factory) on one checkpoint that transformers wrote."""
    directory = tmp_path_factory.mktemp("transformers")
    config = transformers.BailingHybridConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, kv_lora_rank=32, q_lora_rank=request.param,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_group=4, topk_group=2, num_experts_per_tok=3,
        num_local_experts=8, first_k_dense_replace=1, max_position_embeddings=1024, layer_group_size=3,
        eos_token_id=2, pad_token_id=1, num_mtp_layers=0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BailingHybridForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            leaf = name.replace("e_score_correction_bias", "expert_bias").replace("embed_tokens", "word_embeddings")
            tensor.copy_(random_tensor(leaf, TensorSpec(tuple(tensor.shape)), seed=3))
    model.save_pretrained(directory)
    return model, load(directory)


@pytest.fixture(autouse=True)
def _recurrent_torch_form(monkeypatch):
    """The undecorated function: where fla-core is installed the decorated one calls a GPU kernel."""
    recurrent = modeling.recurrent_kimi_delta_attention
    recurrent = getattr(recurrent, "__wrapped__", recurrent)
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
        monkeypatch.setattr(modeling, name, recurrent)


@torch.no_grad()
def test_prefill_logits_agree(pair):
    theirs, ours = pair
    ids = prompt_ids(300)
    expected = theirs(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.5, "logits too flat to tell anything"
    driver = Driver(ours)
    torch.testing.assert_close(driver.target.logits(driver.prefill(ids).hidden), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_chunked_prefill_logits_agree(pair):
    theirs, ours = pair
    ids = prompt_ids(150, seed=1)
    driver = Driver(ours)
    logits = driver.target.logits(driver.prefill(ids, chunk=64).hidden)
    torch.testing.assert_close(logits, theirs(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)


@torch.no_grad()
def test_greedy_tokens_agree(pair):
    theirs, ours = pair
    ids = prompt_ids(40, seed=2)
    generated = theirs.generate(torch.tensor([ids]), max_new_tokens=128, do_sample=False, eos_token_id=None)
    assert Driver(ours).greedy(ids, 128) == generated[0, len(ids) :].tolist()
