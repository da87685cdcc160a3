"""``sgling eval pico``: a perfect model reaches every gate, each planted fault misses the gate that names it."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest

from sgling.bench.evals import pico
from sgling.bench.gate.subject import OpenSubject
from sgling.bench.result import RequestResult
from sgling.bench.tokenizer import FastTokenizer
from sgling.bench.workload import load_template
from sgling.srt.config.model_path import ASSETS_DIR
from sgling.training.generator.mix import SCENARIOS, render_answer
from sgling.training.scorecard import gates, shares

PICO = ASSETS_DIR / "ling3-pico"


class PerfectModel:
    """Answers as the generator would; every draft is accepted, but in Chinese chat only every other step."""

    def __init__(self):
        self.widths = []

    def text(self, prompt) -> str:
        return render_answer(prompt.sample)

    def histogram(self, prompt, width: int) -> list[int]:
        return [5] + [0] * (width - 2) + [5] if prompt.label == "zh_chat" else [0] * (width - 1) + [10]

    async def request(self, prompt, options):
        if prompt.sample is None:  # a right answer fed back for its logprobs
            meta = {"input_token_logprobs": [(-1.0, 1, None)] * 3, "finish_reason": {"type": "length"}}
            return RequestResult(1, 1, success=True, output_len=1, meta_info=meta)
        width = options.extra["speculative"]["max_width"]
        self.widths.append(width)
        counts = self.histogram(prompt, width)
        drafts = sum(index * count for index, count in enumerate(counts))
        meta = {"finish_reason": {"type": "stop"}, "spec_verify_ct": 10, "spec_num_correct_drafts": drafts}
        meta["spec_correct_drafts_histogram"] = counts
        return RequestResult(1, 1, success=True, text=self.text(prompt), output_len=10, meta_info=meta)

    async def info(self):
        return {"device": "cpu"}


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command on a model; returns (exit status, printed text, JSON)."""

    def run(model, *flags):
        @asynccontextmanager
        async def opened(args):
            assert args.engine_args["speculative_num_steps"] == 7
            yield OpenSubject(model, "m", FastTokenizer(PICO), load_template(PICO))

        monkeypatch.setattr(pico, "open_subject", opened)
        out = tmp_path / "card.json"
        sizes = ["--num-questions", "2", "--family-questions", "1", "--width-questions", "1"]
        status = pico.main([*sizes, "--disable-tqdm", "--json", str(out), *flags])
        return status, capsys.readouterr().out, json.loads(out.read_text())

    return run


def test_a_perfect_model_reaches_every_gate(run):
    model = PerfectModel()
    status, shown, card = run(model)
    assert status == 0 and card["missed"] == [] and "all gates reached" in shown
    assert list(card["scenarios"]) == list(SCENARIOS)
    coding = card["scenarios"]["coding"]
    assert coding["held_out"]["answers"] == 2 and coding["new_family"]["answers"] == 1
    assert coding["accept_length_by_width"] == {"2": 2.0, "4": 4.0, "6": 6.0, "8": 8.0}
    assert coding["acceptance_by_position"] == [1.0] * 7
    assert coding["perplexity"] == pytest.approx(2.7183)
    assert card["scenarios"]["zh_chat"]["held_out"]["accept_length"] == 2.5
    assert "new_family" not in card["scenarios"]["small_talk"]
    assert model.widths.count(2) == model.widths.count(6) == model.widths.count(8) == len(SCENARIOS)


def test_wrong_answers_miss_their_gates_by_name(run):
    class Careless(PerfectModel):
        def text(self, prompt):
            right = super().text(prompt)
            faults = {"tool_calling": "<tool_call>nothing</tool_call>", "zh_chat": "好\ufffd", "arithmetic": "#### x"}
            return faults.get(prompt.label, "def broken(" if prompt.label == "coding" else right)

    expected = "coding parses, coding example, coding passes, tool_calling parses, tool_calling exact"
    expected += ", arithmetic exact, zh_chat clean"
    status, shown, card = run(Careless())
    assert status == 1 and f"MISSED: {expected}" in shown and card["missed"] == expected.split(", ")
    assert "arithmetic exact            0.000 (>= 0.80)  MISSED by 0.800" in shown
    assert run(Careless(), "--report-only")[0] == 0


def test_a_drafter_that_knows_nothing_misses_the_accept_gates(run):
    class Undrafted(PerfectModel):
        def histogram(self, prompt, width):
            return [10] + [0] * (width - 1)

    _, _, card = run(Undrafted())
    assert card["missed"] == [f"{name} accept length" for name in SCENARIOS] + ["accept length spread"]


def test_unseen_families_count_for_accept_length_but_not_for_quality():
    whole = {"answers": 10, "ended": 1.0, "accept_length": 3.0}
    checks = {"parses": 1.0, "example": 1.0, "passes": 1.0, "exact": 1.0, "all_figures": 1.0, "clean": 1.0}
    card = {name: {"held_out": whole | checks, "new_family": whole | {"exact": 0.0}} for name in SCENARIOS}
    card["tool_calling"]["new_family"] |= {"accept_length": 2.1}
    assert [gate.name for gate in gates(card) if not gate.reached] == [
        "tool_calling accept length",
        "accept length spread",
    ]


def test_shares_count_only_answers_a_check_applies_to():
    assert shares([{"ended": True, "example": True}, {"ended": False}]) == {"answers": 2, "ended": 0.5, "example": 1.0}


def test_flags_that_contradict_each_other(capsys):
    with pytest.raises(SystemExit):
        pico.main(["--num-questions", "2", "--width-questions", "3"])
    assert "--width-questions in 1 ... --num-questions" in capsys.readouterr().err
