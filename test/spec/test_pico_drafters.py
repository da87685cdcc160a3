"""The embedded DSPARK drafters: small, made for the embedded target, and they draft well without changing text."""

from __future__ import annotations

import json
from functools import cache

import pytest

import sgling
from sgling.srt.config.acceptance import read_acceptance
from sgling.srt.config.model_path import ASSETS_DIR, EMBEDDED_DRAFTERS
from sgling.training.draft.text_format import TextFormat

PROMPTS = 4


@cache
def answers(drafter: str | None) -> tuple[list[list[int]], float]:
    """(greedy ids, accept length) on the first recorded prompts; None: plain decoding."""
    flags = {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": drafter} if drafter else {}
    flags = flags or {"speculative_algorithm": "none"}
    prompts = list(read_acceptance(ASSETS_DIR / "ling3-pico").prompts[:PROMPTS])
    with sgling.Engine(model_path="ling3-pico", log_level="warning", **flags) as engine:
        found = engine.generate(prompts, {"temperature": 0.0, "max_new_tokens": 48})
    steps = sum(answer["meta_info"].get("spec_verify_ct") or 0 for answer in found)
    drafts = sum(answer["meta_info"].get("spec_num_correct_drafts") or 0 for answer in found)
    return [answer["output_ids"] for answer in found], (steps + drafts) / max(steps, 1)


def test_all_weights_of_the_package_are_small():
    assert sum(path.stat().st_size for path in ASSETS_DIR.rglob("*.safetensors")) <= 36_000_000


@pytest.mark.parametrize("name", EMBEDDED_DRAFTERS)
def test_drafter_was_trained_on_the_embedded_target(name):
    facts = json.loads((ASSETS_DIR / name / "training.json").read_text())
    assert facts["identity"] == TextFormat("ling3-pico").identity()._asdict()
    assert (ASSETS_DIR / name / "README.md").is_file()


@pytest.mark.parametrize("name", EMBEDDED_DRAFTERS)
def test_text_is_that_of_plain_decoding_and_drafts_are_accepted(name):
    plain, _ = answers(None)
    drafted, length = answers(name)
    assert drafted == plain
    floor = next(iter(read_acceptance(ASSETS_DIR / name).accept_lengths.values()))
    assert length > 0.75 * floor > 1.5
