"""The opt-in flashinfer backend: plans are fed from the host, output is unchanged, and it is named as what pins it."""

from __future__ import annotations

import sys

import pytest
import torch

from model.tiny_drafter import MLA, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.core.forward_batch import ForwardBatch, ForwardMode
from sgling.srt.layers.attention.flashinfer import FlashInferMissingError, FlashInferMLABackend, host_plan
from sgling.srt.mem_cache.memory_pools import MemoryPools
from sgling.srt.model_executor.graph_runner import capture_graphs
from spec.dspark_harness import dspark
from spec.fake_flashinfer import DeviceToHostCopyError, OnDevice, Plan, install
from spec.harness import Harness, random_prompt, request

SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}


@pytest.fixture
def wrappers(monkeypatch):
    return install(monkeypatch)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


def on_device(tensor: torch.Tensor) -> OnDevice:
    return tensor.as_subclass(OnDevice)


def device_batch(lengths: list[int], width: int) -> ForwardBatch:
    """A verify batch whose tensors live on a pretended device; the host knows its lengths by arithmetic."""
    bs = len(lengths)
    rows = torch.arange(1, bs + 1)
    empty = torch.zeros(bs * width, dtype=torch.int64)
    tensors = (empty, empty, empty, rows, torch.tensor(lengths), rows)
    return ForwardBatch(ForwardMode.TARGET_VERIFY, *map(on_device, tensors), width, 0, 64, seq_lens_cpu=tuple(lengths))


def test_a_plan_copies_nothing_from_the_device(wrappers):
    batch = device_batch([5, 17, 1], 4)
    table = on_device(torch.arange(4 * 64).view(4, 64))
    pools = MemoryPools(table, None, None, None, None)
    backend = FlashInferMLABackend(0.25, (4, 32, 8), torch.float32, "cpu")
    backend.init_forward_metadata_in_graph(batch, pools)
    plan = wrappers[0].plans[0]
    assert plan["qo_indptr"].tolist() == [0, 4, 8, 12]
    assert plan["kv_indptr"].tolist() == [0, 9, 30, 35]
    assert plan["kv_len_arr"].tolist() == [9, 21, 5]
    assert isinstance(plan["kv_indices"], OnDevice) and plan["kv_indices"].dtype == torch.int32
    expected = torch.cat([table.as_subclass(torch.Tensor)[i + 1, :n] for i, n in enumerate((9, 21, 5))])
    assert torch.equal(plan["kv_indices"].as_subclass(torch.Tensor).long(), expected)


def test_the_instrument_catches_device_tensors_in_a_plan():
    lens = torch.ones(2, dtype=torch.int32)
    Plan(("lens",), {"lens": lens})
    with pytest.raises(DeviceToHostCopyError):
        Plan(("lens",), {"lens": on_device(lens)})
    with pytest.raises(DeviceToHostCopyError):
        (on_device(lens) + 1).tolist()


def test_a_batch_without_host_lengths_is_an_error():
    with pytest.raises(ValueError, match="exact lengths on the host"):
        host_plan(device_batch([3], 2)._replace(seq_lens_cpu=None), torch.zeros(2, 8, dtype=torch.int64))


@pytest.mark.parametrize("overrides", [{}, {"num_key_value_heads": 4}, SLIDING, {**SLIDING, "is_causal": False}, MLA],
                         ids=["grouped", "multi-head", "sliding", "sliding, whole block", "latent"])  # fmt: skip
def test_dspark_output_and_acceptance_are_unchanged(target, tmp_path, wrappers, overrides):
    drafter = write_tiny_drafter(tmp_path, block_size=6, **overrides)
    requests = [request("a", random_prompt(13, 1)), request("bb", random_prompt(40, 2), temperature=0.9)]
    plain = dspark(target, drafter, disable_overlap_schedule=True).run(*requests)
    harness = dspark(target, drafter, attention_backend="flashinfer")
    outcomes = harness.run(*requests)
    assert {rid: o.ids for rid, o in outcomes.items()} == {rid: o.ids for rid, o in plain.items()}
    assert outcomes["a"].spec.accept_histogram == plain["a"].spec.accept_histogram
    kinds = 1 if overrides == MLA else 1 + len(set(harness.core.args.spec.drafter.layers))
    assert len(wrappers) == kinds and all(wrapper.plans for wrapper in wrappers)


def test_compact_verify_and_plain_decoding_work_too(target, tmp_path, wrappers, monkeypatch):
    requests = [request(f"r{i}", random_prompt(9 + 5 * i, i)) for i in range(3)]
    plain = Harness(target, speculative_algorithm="none").run(*requests)
    pinned = Harness(target, speculative_algorithm="none", attention_backend="flashinfer").run(*requests)
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    rates = tmp_path / "sps.json"
    rates.write_text('{"sample_batch_tokens": [1, 8, 16], "sample_steps_per_sec": [100, 60, 30]}')
    compact = dspark(target, write_tiny_drafter(tmp_path / "d"), attention_backend="flashinfer",
                     speculative_dspark_sps_table_path=str(rates)).run(*requests)  # fmt: skip
    for outcomes in (pinned, compact):
        assert {rid: o.ids for rid, o in outcomes.items()} == {rid: o.ids for rid, o in plain.items()}


def test_it_is_named_as_what_pins_the_host(target, tmp_path, wrappers):
    harness = dspark(target, write_tiny_drafter(tmp_path), attention_backend="flashinfer")
    info = harness.scheduler.start_info().info
    assert info["needs_cpu_seq_lens"] is True
    assert info["pinning_backends"] == ["FlashInferMLABackend", "FlashInferBlockBackend"]
    assert harness.scheduler.overlaps is False
    runner = harness.core.runner
    runner.device = "cuda"
    assert capture_graphs(harness.core.args, runner, harness.scheduler.worker) is None
    default = dspark(target, tmp_path)
    assert default.scheduler.overlaps is True
    assert default.scheduler.start_info().info["pinning_backends"] == []


def test_without_the_package_the_error_says_what_to_install(target, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(FlashInferMissingError, match=r"sgling\[flashinfer\]"):
        Harness(target, speculative_algorithm="none", attention_backend="flashinfer")


def test_nextn_is_refused():
    with pytest.raises(ServerArgsError, match="not built for NEXTN"):
        ServerArgs.from_kwargs(
            model_path="m", device="cpu", speculative_algorithm="NEXTN", attention_backend="flashinfer"
        )
