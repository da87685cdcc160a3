"""Drafter invariance: output ids do not depend on drafter, width, acceptance, rollback, chunking or neighbours."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

from model.tiny_model import write_tiny_checkpoint
from spec.harness import Harness, Oracle, Outcome, random_drafter
from spec.invariance import FEATURES, VOCAB, pairwise, plain_answers, prompts_of, tight_pool

AXES = {
    "width": tuple(range(1, 9)),
    "rollback": ("replay", "staged"),
    "batch": (1, 2, 3, 5),
    "drafter": ("nextn", "random", "wrong", "oracle"),
    "chunk": (7, 64, -1),
    "feature": tuple(FEATURES),
    "overlap": (True, False),
}


class Case(NamedTuple):
    width: int
    rollback: str
    batch: int
    drafter: str
    chunk: int
    feature: str
    overlap: bool


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def plain(model_dir):
    return plain_answers(model_dir)


def run_case(model_dir, plain, case: Case) -> dict[str, Outcome]:
    requests = prompts_of(case.feature, case.batch)
    harness = Harness(
        model_dir,
        speculative_num_steps=case.width - 1,
        linear_rollback=case.rollback,
        chunked_prefill_size=case.chunk,
        disable_overlap_schedule=not case.overlap,
        **tight_pool(case.feature, requests, case.width),
    )
    truth = {item.rid: plain[case.feature, item.rid] for item in requests}
    drafter = {
        "nextn": None,
        "random": random_drafter(VOCAB),
        "wrong": Oracle(harness, truth, VOCAB, always_wrong=True),
        "oracle": Oracle(harness, truth, VOCAB),
    }[case.drafter]
    harness.use_drafter(drafter)
    outcomes = harness.run(*requests)
    for rid, (_, ids) in truth.items():
        assert outcomes[rid].ids == ids, (case, rid)
    return outcomes


@pytest.mark.parametrize(
    "case", [Case(*values) for values in pairwise(AXES)], ids=lambda case: "-".join(map(str, case))
)
def test_output_equals_plain_decoding(model_dir, plain, case):
    run_case(model_dir, plain, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("feature", AXES["feature"])
@pytest.mark.parametrize("width", AXES["width"])
def test_output_equals_plain_decoding_full_product(model_dir, plain, width, feature):
    axes = {**AXES, "width": (width,), "feature": (feature,)}
    for values in itertools.product(*axes.values()):
        run_case(model_dir, plain, Case(*values))


@pytest.mark.parametrize("width", range(2, 9))
def test_every_accept_length_occurs_under_the_planted_oracle(model_dir, plain, width):
    case = Case(width, "replay", 3, "oracle", -1, "greedy", True)
    outcomes = run_case(model_dir, plain, case)
    histogram = [sum(counts) for counts in zip(*(o.spec.accept_histogram for o in outcomes.values()), strict=True)]
    assert len(histogram) == width
    assert all(histogram), histogram


def test_retraction_really_happens_and_changes_nothing(model_dir, plain):
    case = Case(4, "replay", 5, "nextn", 64, "retraction", True)
    outcomes = run_case(model_dir, plain, case)
    assert sum(outcome.retractions for outcome in outcomes.values()) > 0


def test_minimum_length_is_exact_and_the_stop_follows_at_once(model_dir, plain):
    case = Case(5, "replay", 3, "oracle", -1, "min_tokens", True)
    for outcome in run_case(model_dir, plain, case).values():
        assert len(outcome.ids) == FEATURES["min_tokens"]["min_new_tokens"] + 1
        assert (outcome.reason.type, outcome.reason.matched) == ("stop", 2)
