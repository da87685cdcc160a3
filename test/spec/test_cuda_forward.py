"""A target forward on the CUDA C++ kernels, emulated, in bf16: a row has the bits of plain decoding in every verify.

Whole windows and packed ones (``core/ragged.py``). Ids hide a difference in the last bit for hundreds of tokens; this
compares the hidden states.
"""

from __future__ import annotations

import pytest
import torch

from model.driver import Driver, join, load, prompt_ids
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode
from sgling.srt.core.ragged import RaggedVerifyLayout
from sgling_kernel import dispatch
from spec.test_triton_engine import use_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test/gpu runs the kernels themselves")

COMMON = {  # one KDA layer with a dense FFN, one MLA layer with experts
    "num_hidden_layers": 2,
    "layer_group_size": 2,
    "hidden_size": 256,
    "num_experts": 32,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "intermediate_size": 64,
    "expert_swiglu_limit_list": [0, 0.4],
    "share_expert_swiglu_limit_list": [0, 0.7],
}
SHAPES = {
    "published heads": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
    },
    "small heads": {"head_dim": 32},  # attention has no CUDA form, and rows of the projections begin anywhere
}
EVERYWHERE = {"linear.cuda", "norm.cuda", "router.cuda", "moe.cuda", "moe.finish", "kda.cuda"}
ATTENTION = {"mla_prepare.cuda", "mla_decode.cuda", "linear.gated"}
WIDTH, HISTORIES = 3, (5, 7)


@pytest.fixture
def served(emulated_cuda, monkeypatch) -> set[str]:
    """Every operator takes its CUDA form where it has one; the names of those that did."""
    served, usable = set(), dispatch.usable

    def asked(path, reason):
        served.update([path] if reason is None else [])
        return usable(path, reason)

    use_kernels(monkeypatch)
    monkeypatch.setattr(dispatch, "usable", asked)
    return served


def prompt(row: int) -> list[int]:
    return prompt_ids(HISTORIES[row], seed=row)


def window(row: int) -> list[int]:
    return prompt_ids(WIDTH, seed=10 + row)


def two_requests(loaded) -> list[Driver]:
    """Both behind their prompts, in the same pools."""
    first = Driver(loaded, length=32, width=WIDTH, dtype=torch.bfloat16)
    drivers = [first, Driver(loaded, length=32, width=WIDTH, dtype=torch.bfloat16, beside=first)]
    for row, driver in enumerate(drivers):
        driver.prefill(prompt(row))
    return drivers


def windows(drivers: list[Driver]) -> ForwardBatch:
    return join(*(driver.batch(ForwardMode.TARGET_VERIFY, window(row)) for row, driver in enumerate(drivers)))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_bits_of_plain_decoding_in_every_verify(tmp_path, served, shape):
    directory = write_tiny_checkpoint(tmp_path, **COMMON, **SHAPES[shape])
    loaded = load(directory, load_format="dummy", dtype=torch.bfloat16)  # tensors in a file begin anywhere
    with torch.inference_mode():
        drivers = two_requests(loaded)
        steps = [[driver.decode(token).hidden for token in window(row)] for row, driver in enumerate(drivers)]
        plain = torch.cat([hidden for rows in steps for hidden in rows])
        expected = EVERYWHERE | (ATTENTION if shape == "published heads" else set())
        assert served >= expected, expected - served

        drivers = two_requests(loaded)
        batch, pools = windows(drivers), drivers[0].pools
        dense = loaded.target.forward(batch, pools).hidden
        assert torch.equal(dense, plain)

        for lens in ((3, 1), (1, 2), (3, 3)):
            layout = RaggedVerifyLayout.build(torch.tensor(lens), WIDTH, 6)
            packed = {name: layout.pack(getattr(batch, name)) for name in ("input_ids", "positions", "out_cache_loc")}
            drivers = two_requests(loaded)
            hidden = loaded.target.forward(batch._replace(**packed, ragged=layout), drivers[0].pools).hidden
            kept = torch.arange(WIDTH) < torch.tensor(lens).unsqueeze(-1)
            assert torch.equal(layout.spread(hidden)[kept.flatten()], plain[kept.flatten()]), lens
