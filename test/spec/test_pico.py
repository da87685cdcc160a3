"""The embedded model: its NEXTN layer really drafts, and speculation never changes what it writes.

Prompts are held out of training (families and slot values), rendered by the chat template the server uses.
"""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import Tokenizer

from sgling.training.generator.mix import PICO_DIR, draw, render_prompt
from spec.harness import Harness, request

PROMPTS_PER_SCENARIO = 3
FLOOR = {"coding": 2.2, "tool_calling": 2.2, "zh_chat": 1.5, "long_report": 1.5, "arithmetic": 1.5}


@cache
def prompts(scenario: str) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(PICO_DIR / "tokenizer.json"))
    texts = [render_prompt(draw(scenario, f"pico-test:{i}", "held_out")) for i in range(PROMPTS_PER_SCENARIO)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def generate(harness: Harness, **params):
    """Outcomes of all prompts of all scenarios, run together; rid is scenario:index."""
    requests = [
        request(f"{scenario}:{i}", ids, ignore_eos=False, max_new_tokens=80, **params)
        for scenario in FLOOR
        for i, ids in enumerate(prompts(scenario))
    ]
    return harness.run(*requests)


@pytest.fixture(scope="module")
def plain():
    return generate(Harness(PICO_DIR, speculative_algorithm="none", max_running_requests=1))


@pytest.mark.parametrize("width", [2, 4, 8])
def test_speculation_changes_no_token_of_the_trained_model(plain, width):
    outcomes = generate(Harness(PICO_DIR, speculative_num_steps=width - 1, max_running_requests=16))
    assert {rid: o.ids for rid, o in outcomes.items()} == {rid: o.ids for rid, o in plain.items()}


def test_seeded_sampling_of_the_trained_model_is_the_same_alone_and_in_a_batch():
    params = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    alone = generate(Harness(PICO_DIR, speculative_algorithm="none", max_running_requests=1), **params)
    together = generate(Harness(PICO_DIR, speculative_num_steps=4, max_running_requests=16), **params)
    assert {rid: o.ids for rid, o in together.items()} == {rid: o.ids for rid, o in alone.items()}


def test_accept_length_holds_in_every_scenario():
    outcomes = generate(Harness(PICO_DIR, speculative_num_steps=3, max_running_requests=16))
    for scenario, floor in FLOOR.items():
        spec = [outcome.spec for rid, outcome in outcomes.items() if rid.startswith(f"{scenario}:")]
        accept_length = 1 + sum(s.correct_drafts for s in spec) / sum(s.verify_ct for s in spec)
        assert accept_length > floor, (scenario, accept_length)
