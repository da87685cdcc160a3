"""The acceptance smoke: floors by drafter and width, a loud warning below, silence above, and its place at start."""

from __future__ import annotations

import json
import logging

import pytest

from server.serving_helpers import running_manager, server_args, small_tokenizer
from sgling.srt.config.acceptance import (
    DEFAULT_PROMPTS,
    FLOOR_SHARE,
    Acceptance,
    floor_key,
    read_acceptance,
    wants_smoke,
)
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.managers.acceptance_smoke import SmokeResult, judge, report, run_smoke


def spec(**changes):
    return server_args(**changes).spec


def answer(steps: int, drafts: int) -> dict:
    return {"meta_info": {"spec_verify_ct": steps, "spec_num_correct_drafts": drafts}}


def test_floors_belong_to_a_drafter_and_a_width():
    known = Acceptance(("a",), {"NEXTN-4": 2.0})
    assert floor_key(spec()) == "NEXTN-4"
    assert known.floor(spec()) == 2.0 * FLOOR_SHARE
    assert known.floor(spec(speculative_num_steps=2)) is None
    assert known.floor(spec(speculative_num_steps=3, speculative_depth="auto")) is None


def test_the_file_is_written_and_read(tmp_path):
    assert read_acceptance(tmp_path) == Acceptance(DEFAULT_PROMPTS, {})
    recorded = Acceptance(("你好",), {}).with_measured(spec(), 2.34567)
    recorded.write(tmp_path)
    assert read_acceptance(tmp_path) == Acceptance(("你好",), {"NEXTN-4": 2.346})


@pytest.mark.parametrize("content", ["", "[]", '{"prompts": []}', '{"prompts": ["a"], "accept_lengths": {"x": "y"}}'])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "acceptance.json").write_text(content)
    with pytest.raises(ServerArgsError, match="acceptance.json"):
        read_acceptance(tmp_path)


@pytest.mark.parametrize(
    ("mode", "floors", "wanted"),
    [("auto", {}, False), ("auto", {"NEXTN-4": 2.0}, True), ("on", {}, True), ("off", {"NEXTN-4": 2.0}, False)],
)
def test_when_the_smoke_runs(mode, floors, wanted):
    known = Acceptance((), floors)
    assert wants_smoke(server_args(speculative_smoke=mode), known) is wanted
    assert not wants_smoke(server_args(speculative_smoke=mode, speculative_algorithm="none"), known)
    assert wants_smoke(server_args(speculative_smoke=mode, load_format="dummy"), known) is (mode == "on")


def test_an_all_rejecting_drafter_is_shouted_about(caplog):
    known = Acceptance(("a",), {"NEXTN-4": 2.0})
    bad = judge([answer(30, 0), answer(10, 2)], known, spec())
    assert bad == SmokeResult(42 / 40, 1.8, False)
    report(bad, spec())
    assert "ACCEPT LENGTH 1.05 IS BELOW THE RECORDED FLOOR 1.80 (NEXTN-4)" in caplog.text
    caplog.clear()
    good = judge([answer(10, 10)], known, spec())
    with caplog.at_level(logging.INFO):
        report(good, spec())
    assert good.passed and caplog.records[0].levelno == logging.INFO


async def _smoke(acceptance: Acceptance):
    async with running_manager(small_tokenizer()) as (manager, _):
        manager.acceptance_smoke = await run_smoke(manager, acceptance)
        return await manager.server_info()


def test_the_result_is_in_the_server_info():
    import asyncio

    info = asyncio.run(_smoke(Acceptance(("The quick brown fox",), {})))
    assert info["acceptance_smoke"]["accept_length"] > 1
    assert info["acceptance_smoke"]["passed"] is None
    assert json.loads(json.dumps(info["acceptance_smoke"])) == info["acceptance_smoke"]


def test_prompts_that_cannot_be_served_skip_the_smoke(caplog):
    import asyncio

    info = asyncio.run(_smoke(Acceptance(("word " * 5000,), {})))
    assert info["acceptance_smoke"] is None and "Acceptance smoke skipped" in caplog.text
