"""What "output does not depend on X" tests share: requests by feature, their plain answers, pairwise case tables."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

from spec.harness import Harness, random_prompt, request

VOCAB = 512
MAX_BATCH = 5
FEATURES = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {7: 6.0, 9: -100.0}, "temperature": 0.8},
    "min_p": {"min_p": 0.2, "temperature": 1.3},
    "min_tokens": {"min_new_tokens": 9, "ignore_eos": False, "logit_bias": {2: 100.0}},
    "retraction": {"temperature": 0.7, "presence_penalty": 0.5, "max_new_tokens": 40},
}


def prompts_of(feature: str, batch: int):
    """``batch`` requests that use a feature."""
    return [
        request(f"r{'x' * i}", random_prompt(11 + 23 * i, seed=i, vocab=VOCAB), **FEATURES[feature])
        for i in range(batch)
    ]


def plain_answers(model_dir: Path, features: Iterable[str] = FEATURES) -> dict[tuple[str, str], tuple[int, list[int]]]:
    """(feature, rid) -> (prompt length, ids) of plain decoding, one request at a time, whole prompts: the oracle."""
    truth = {}
    for feature in features:
        harness = Harness(model_dir, speculative_algorithm="none", chunked_prefill_size=-1)
        for item in prompts_of(feature, MAX_BATCH):
            outcome = harness.run(item)[item.rid]
            truth[feature, item.rid] = (len(item.input_ids), outcome.ids)
    return truth


def tight_pool(feature: str, requests, window: int) -> dict:
    """Server arguments that make the retraction feature retract: room for one and a half of the longest request."""
    if feature != "retraction":
        return {}
    longest = max(len(item.input_ids) for item in requests) + 40
    return {"max_total_tokens": 3 * longest // 2 + 6 * window}


def pairwise(axes: dict[str, tuple]) -> list[tuple]:
    """A small set of cases in which every pair of values of any two axes occurs."""
    rng = random.Random(0)
    everything = list(itertools.product(*axes.values()))
    open_pairs = {pair for case in everything for pair in _pairs(case)}
    chosen = []
    while open_pairs:
        best = max(
            rng.sample(everything, min(200, len(everything))),
            key=lambda case: len(open_pairs.intersection(_pairs(case))),
        )
        covered = open_pairs.intersection(_pairs(best))
        if covered:
            chosen.append(best)
            open_pairs -= covered
    return chosen


def _pairs(case: tuple):
    return itertools.combinations(enumerate(case), 2)
