"""--speculative-token-map: a drafter over few tokens changes no output id; a bad file stops the start."""

from __future__ import annotations

import json

import pytest
import torch
import torch.multiprocessing as mp

from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.config.token_map import read_token_map
from sgling.srt.managers.scheduler_job import make_job
from sgling_kernel.logits import reference as logits
from spec.harness import Harness
from spec.invariance import FEATURES, VOCAB, plain_answers, prompts_of, tight_pool
from spec.test_tensor_parallel import assert_one_plan, free_port
from spec.tp_rank import TP, rank_main, requests

HOT = sorted(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:40].tolist())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def plain(model_dir):
    return plain_answers(model_dir)


def write(tmp_path, content, name: str = "hot.json") -> str:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def drafted_by(harness: Harness) -> set[int]:
    """Collects every token the NEXTN layer drafts from now on."""
    seen, stash = set(), harness.core.runner.future.stash

    def stashed(rows, seed, hidden):
        seen.update(seed.tolist())
        stash(rows, seed, hidden)

    harness.core.runner.future.stash = stashed
    return seen


@pytest.mark.parametrize("feature", FEATURES)
def test_output_equals_plain_decoding_and_only_listed_tokens_are_drafted(model_dir, plain, feature, tmp_path):
    asked = prompts_of(feature, 3)
    harness = Harness(
        model_dir,
        speculative_num_steps=3,
        speculative_token_map=write(tmp_path, HOT),
        **tight_pool(feature, asked, 4),
    )
    drafted = drafted_by(harness)
    outcomes = harness.run(*asked)
    for item in asked:
        assert outcomes[item.rid].ids == plain[feature, item.rid][1]
    assert drafted and drafted <= set(HOT)


def test_a_map_of_the_whole_vocabulary_drafts_what_no_map_drafts(model_dir, tmp_path):
    asked = prompts_of("seeded", 2) + prompts_of("greedy", 1)
    asked[2].rid = "greedy"
    counters = []
    for extra in ({}, {"speculative_token_map": write(tmp_path, list(range(VOCAB)))}):
        outcomes = Harness(model_dir, speculative_num_steps=3, **extra).run(*asked)
        counters.append({rid: (outcome.ids, outcome.spec) for rid, outcome in outcomes.items()})
    assert counters[0] == counters[1]


def test_two_ranks_of_which_one_owns_no_listed_token(model_dir, tmp_path):
    kwargs = {"speculative_num_steps": 3, "speculative_token_map": write(tmp_path, list(range(VOCAB // 4)))}
    alone = Harness(model_dir, speculative_algorithm="none").run(*requests())
    mp.spawn(rank_main, (free_port(), str(model_dir), kwargs, str(tmp_path)), nprocs=TP)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(TP)]
    assert ranks[0]["ids"] == {rid: outcome.ids for rid, outcome in alone.items()}
    assert_one_plan([rank["plan"] for rank in ranks])


def test_files_of_both_kinds_are_read_in_ascending_order(tmp_path):
    shuffled = [9, 2, 5]
    torch.save(torch.tensor(shuffled), tmp_path / "tensor.pt")
    torch.save(shuffled, tmp_path / "list.pt")
    for path in (write(tmp_path, shuffled), tmp_path / "tensor.pt", tmp_path / "list.pt"):
        assert read_token_map(str(path), 10) == (2, 5, 9)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], "empty"),
        ([3, VOCAB], f"id {VOCAB} is outside the vocabulary"),
        ([-1], "outside"),
        ([4, 5, 4], "1 ids are repeated"),
        ([1.5], "1.5 is not a token id"),
        ([True], "not a token id"),
        ({"ids": [1]}, "not a list"),
        ("[1, 2", "hot.json"),
    ],
)
def test_a_bad_file_is_a_startup_error_that_names_the_flag(model_dir, tmp_path, content, text):
    path = write(tmp_path, content)
    with pytest.raises(ServerArgsError, match="--speculative-token-map") as error:
        make_job(job_args(model_dir, "NEXTN", path))
    assert text in str(error.value)


def job_args(model_dir, algorithm: str, path: str) -> ServerArgs:
    return ServerArgs.from_kwargs(
        model_path=str(model_dir), speculative_algorithm=algorithm, speculative_token_map=path
    )


def test_missing_files_damaged_tensors_and_other_drafters_are_refused(model_dir, tmp_path):
    (tmp_path / "bad.pt").write_bytes(b"no tensor")
    for algorithm, path in (("NEXTN", "absent.json"), ("NEXTN", "bad.pt"), ("none", write(tmp_path, HOT))):
        with pytest.raises(ServerArgsError, match="--speculative-token-map"):
            make_job(job_args(model_dir, algorithm, str(tmp_path / path)))


def test_best_token_maps_columns_and_the_lowest_id_wins_ties():
    scores, ids = torch.tensor([[1.0, 3.0, 3.0], [0.0, float("nan"), -1.0]]), torch.tensor([4, 17, 30])
    out = torch.zeros(2, dtype=torch.int64)
    logits.best_token(scores, 0, out, ids)
    assert out.tolist() == [17, 4]
