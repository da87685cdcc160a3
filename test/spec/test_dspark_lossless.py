"""Conformance 4 and 5 (docs/dspark.md §8) and drafter invariance: DSPARK output is that of plain decoding."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

import pytest

from model.tiny_drafter import MLA, write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from spec.dspark_harness import BLOCK_SIZES, dspark, use_drafts
from spec.dspark_training import write_trained_drafter
from spec.harness import Harness, Oracle, Outcome, random_drafter, random_prompt, request
from spec.invariance import FEATURES, VOCAB, pairwise, plain_answers, prompts_of, tight_pool

AXES = {
    "block": tuple(BLOCK_SIZES),
    "rollback": ("replay", "staged"),
    "batch": (1, 2, 3, 5),
    "drafter": ("dense", "mla", "trained", "random", "wrong", "oracle"),
    "chunk": (7, 64, -1),
    "feature": tuple(FEATURES),
    "overlap": (True, False),
    "verify": ("static", "compact", "cap-accept"),
}
STEP_RATES = {"sample_batch_tokens": [1, 8, 16, 32, 64], "sample_steps_per_sec": [100, 90, 75, 50, 30]}


class Case(NamedTuple):
    block: int
    rollback: str
    batch: int
    drafter: str
    chunk: int
    feature: str
    overlap: bool
    verify: str = "static"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def plain(target):
    return plain_answers(target)


@pytest.fixture(scope="module")
def directories(target, plain, tmp_path_factory):
    """Drafters of block 16; a smaller block uses the first drafts of theirs (``--speculative-dspark-block-size``).

    "step rates" is the cost table of scheduled steps.
    """
    base = tmp_path_factory.mktemp("drafters")
    known = [(item.input_ids, plain["greedy", item.rid][1]) for item in prompts_of("greedy", 5)]
    trained = write_trained_drafter(target, base / "trained", known, steps=60, block_size=16)
    dense = write_tiny_drafter(base / "dense", block_size=16, markov_head_type="gated")
    mla = write_tiny_drafter(base / "mla", block_size=16, markov_head_type="rnn", **MLA)
    rates = base / "sps.json"
    rates.write_text(json.dumps(STEP_RATES))
    return {"trained": trained, "dense": dense, "mla": mla, "step rates": rates}


def run_case(target, plain, directories, case: Case) -> dict[str, Outcome]:
    requests = prompts_of(case.feature, case.batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_RAGGED_VERIFY_MODE", case.verify)
        harness = dspark(
            target,
            directories.get(case.drafter, directories["dense"]),
            speculative_dspark_block_size=case.block,
            speculative_dspark_sps_table_path=str(directories["step rates"]),
            linear_rollback=case.rollback,
            chunked_prefill_size=case.chunk,
            disable_overlap_schedule=not case.overlap,
            **tight_pool(case.feature, requests, case.block + 1),
        )
    truth = {item.rid: plain[case.feature, item.rid] for item in requests}
    by_hand = {
        "random": random_drafter(VOCAB),
        "wrong": Oracle(harness, truth, VOCAB, always_wrong=True),
        "oracle": Oracle(harness, truth, VOCAB),
    }
    use_drafts(harness, by_hand.get(case.drafter))
    outcomes = harness.run(*requests)
    for rid, (_, ids) in truth.items():
        assert outcomes[rid].ids == ids, (case, rid)
    return outcomes


@pytest.mark.parametrize(
    "case", [Case(*values) for values in pairwise(AXES)], ids=lambda case: "-".join(map(str, case))
)
def test_output_equals_plain_decoding(target, plain, directories, case):
    run_case(target, plain, directories, case)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_block_of_every_trained_size_is_drafted_whole(target, plain, tmp_path, size):
    harness = dspark(target, write_tiny_drafter(tmp_path, block_size=size))
    requests = prompts_of("seeded", 3)
    outcomes = harness.run(*requests)
    assert {rid: o.ids for rid, o in outcomes.items()} == {r.rid: plain["seeded", r.rid][1] for r in requests}
    assert all(len(o.spec.accept_histogram) == size + 1 for o in outcomes.values())


def test_trained_drafter_is_accepted_often_and_changes_nothing(target, plain, directories):
    outcomes = run_case(target, plain, directories, Case(16, "replay", 5, "trained", -1, "greedy", True))
    verifies = sum(o.spec.verify_ct for o in outcomes.values())
    assert sum(len(o.ids) - 1 for o in outcomes.values()) / verifies > 2.5


@pytest.mark.parametrize("block", BLOCK_SIZES)
@pytest.mark.parametrize("verify", ["compact", "cap-accept"])
def test_scheduled_batches_equal_plain_decoding_at_every_block_size(target, plain, directories, block, verify):
    run_case(target, plain, directories, Case(block, "replay", 5, "trained", 64, "seeded", True, verify))


def test_4_random_tokens_are_almost_never_accepted_and_change_nothing(target, plain, directories):
    outcomes = run_case(target, plain, directories, Case(8, "replay", 5, "random", -1, "greedy", True))
    verifies = sum(o.spec.verify_ct for o in outcomes.values())
    assert 1.0 <= sum(len(o.ids) - 1 for o in outcomes.values()) / verifies < 1.1


@pytest.fixture(scope="module")
def long_answers(target):
    """24 prompts with 96 greedy tokens each."""
    requests = [request(f"r{i}", random_prompt(5 + 3 * i, seed=100 + i), max_new_tokens=96) for i in range(24)]
    return requests, Harness(target, speculative_algorithm="none").run(*requests)


@pytest.mark.parametrize("rollback", ["replay", "staged"])
def test_5_greedy_equality_on_24_prompts_of_96_tokens(target, long_answers, directories, rollback):
    requests, plain = long_answers
    harness = dspark(target, directories["trained"], speculative_dspark_block_size=8, linear_rollback=rollback)
    outcomes = harness.run(*requests)
    assert {rid: o.ids for rid, o in outcomes.items()} == {rid: o.ids for rid, o in plain.items()}


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_every_accept_length_occurs_under_the_planted_oracle(target, long_answers, directories, block):
    requests, plain = long_answers
    harness = dspark(target, directories["dense"], speculative_dspark_block_size=block, max_running_requests=1)
    truth = {item.rid: (len(item.input_ids), plain[item.rid].ids) for item in requests[:10]}
    oracle = Oracle(harness, truth, VOCAB)

    def anywhere(worker, step):
        oracle.turn = random.randrange(step.width)  # where the one error is planted
        oracle(worker, step)

    harness.use_drafter(anywhere)
    outcomes = harness.run(*requests[:10])
    assert all(outcomes[rid].ids == ids for rid, (_, ids) in truth.items())
    histogram = [sum(counts) for counts in zip(*(o.spec.accept_histogram for o in outcomes.values()), strict=True)]
    assert len(histogram) == block + 1
    assert all(histogram), histogram


def test_retraction_carries_the_drafters_cache_along(target, plain, directories):
    case = Case(8, "replay", 5, "trained", 64, "retraction", True)
    outcomes = run_case(target, plain, directories, case)
    assert sum(outcome.retractions for outcome in outcomes.values()) > 0
