"""Two gloo ranks give the logits of one, hold exactly their share, and agree on every collective to the bit."""

from __future__ import annotations

import pytest
import torch

from model import tp_worker
from model.driver import load
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.model_config import ModelConfig
from sgling.srt.distributed.parallel_state import ParallelState, init_parallel
from sgling.srt.model_loader.footprint import is_replicated, rank_weight_bytes
from sgling.srt.model_loader.inventory import expected_tensors

SIZE = 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One checkpoint per form of the MLA query projection."""
    ranks = {"direct-q": None, "q-latent": 24}
    base = tmp_path_factory.mktemp("tp")
    return {name: write_tiny_checkpoint(base / name, num_shards=2, q_lora_rank=rank) for name, rank in ranks.items()}


@pytest.fixture(scope="module")
def checkpoint(checkpoints):
    return checkpoints["direct-q"]


@pytest.fixture(scope="module")
def outcomes(checkpoints, tmp_path_factory):
    """What each rank saved."""
    results = tmp_path_factory.mktemp("ranks")
    directories = {name: str(path) for name, path in checkpoints.items()}
    torch.multiprocessing.spawn(tp_worker.run_rank, (SIZE, directories, str(results)), nprocs=SIZE)
    return [torch.load(results / f"rank{rank}.pt") for rank in range(SIZE)]


@pytest.fixture(scope="module")
def ranks(outcomes):
    return [outcome["direct-q"] for outcome in outcomes]


@pytest.fixture(scope="module")
def single(checkpoint):
    return tp_worker.forwards(load(checkpoint, with_nextn=True))


@pytest.mark.parametrize("variant", ["direct-q", "q-latent"])
def test_logits_equal_the_single_rank(checkpoints, outcomes, variant):
    single = tp_worker.forwards(load(checkpoints[variant], with_nextn=True))
    for logits in ("logits", "draft_logits"):
        joined = torch.cat([outcome[variant][logits] for outcome in outcomes], dim=-1)
        torch.testing.assert_close(joined, single[logits], atol=1e-5, rtol=0)


@pytest.mark.parametrize("hidden", ["hidden", "draft"])
def test_ranks_hold_the_same_hidden_bits(ranks, hidden):
    assert torch.equal(*(rank[hidden] for rank in ranks))


def test_vocabulary_ranges_tile(ranks):
    assert [rank["vocab_range"] for rank in ranks] == [(0, 256), (256, 256)]


def test_no_rank_holds_a_whole_expert_or_head(ranks, single):
    whole = single["shapes"]
    for rank in ranks:
        shapes = rank["shapes"]
        halved = {name for name in whole if torch.Size(shapes[name]).numel() * 2 == torch.Size(whole[name]).numel()}
        assert halved == set(whole) - {"gate"}
        assert shapes["gate"] == whole["gate"], "the router is replicated"
        assert shapes["w13"] == (8, 24, 64) and shapes["w2"] == (8, 64, 12)
        assert shapes["head"] == (256, 64)


def test_sharded_bytes_are_exactly_total_over_tp(checkpoint, ranks, single):
    config = ModelConfig.from_dir(checkpoint)
    specs = expected_tensors(config, with_nextn=True)
    replicated = sum(4 * spec.numel for name, spec in specs.items() if is_replicated(name))
    for rank in ranks:
        held = rank["weight_bytes"]
        assert (held - replicated) * SIZE == single["weight_bytes"] - replicated
        assert held == rank_weight_bytes(config, SIZE, torch.float32, with_nextn=True)


def test_collectives(outcomes):
    first, second = (outcome["collectives"] for outcome in outcomes)
    for results in (first, second):
        score, ids = results["best"]
        assert score.tolist() == [3.0, 5.0, 2.0, -7.0] and ids.tolist() == [300, 11, 12, 303]
        assert results["max"].tolist() == [4.0, 9.0]
        assert results["sum"].tolist() == [3 * (2**40 + 1), 9]
        assert results["bytes"] and results["from_rank_1"] == b"hello"
        assert results["scalar"].tolist() == [0.0, 1.0]
    for name in ("all_reduce", "all_reduce_bf16"):
        assert torch.equal(first[name], second[name])


def test_dummy_weights_of_two_ranks_tile_the_single_one(checkpoint):
    whole = load(checkpoint, load_format="dummy").target
    parts = [
        load(checkpoint, ParallelState(rank, SIZE, None, None), load_format="dummy").target for rank in range(SIZE)
    ]
    head = [part.logits_processor.weight for part in parts]
    assert torch.equal(torch.cat(head), whole.logits_processor.weight)
    down = [part.layers[1].mlp.experts.w2 for part in parts]
    assert torch.equal(torch.cat(down, dim=-1), whole.layers[1].mlp.experts.w2)


def test_single_state_needs_no_process_group():
    parallel = init_parallel(0, 1, "unused", "gloo")
    x = torch.randn(3)
    assert parallel == ParallelState.single() and parallel.all_reduce(x) is x
    assert parallel.broadcast_bytes(b"x") == b"x" and parallel.shard(6) == (0, 6)
    with pytest.raises(ValueError, match="dimension of 7"):
        ParallelState(1, 2, None, None).shard(7)


@pytest.mark.parametrize(("rank", "backend"), [(2, "gloo"), (0, "mpi")])
def test_bad_groups_are_refused(rank, backend):
    with pytest.raises(ValueError, match="outside a group|supported are gloo and nccl"):
        init_parallel(rank, 2, "tcp://127.0.0.1:1", backend)
