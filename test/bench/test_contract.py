"""Contracts: mistakes are explained by line, bounds mean what they say, and the slow scenario is the one named."""

from __future__ import annotations

import asyncio
import json

import pytest

from sgling.bench.contract import command
from sgling.bench.contract.bounds import Bound
from sgling.bench.contract.judge import Baseline, format_rows, judge_contract, load_baseline, save_baseline
from sgling.bench.contract.measure import Cell, cell_values, decode_steps, has_invalid_call, measure_contract
from sgling.bench.contract.schema import load_contract
from sgling.bench.contract.yaml_reader import SchemaError
from sgling.bench.datasets import Prompt
from sgling.bench.gate.correctness import Check
from sgling.bench.gate.golden import packaged_file
from sgling.bench.gate.subject import OpenSubject
from sgling.bench.result import RequestResult
from sgling.bench.scenarios import scenario_prompt, scenario_samples
from sgling.bench.tokenizer import FastTokenizer
from sgling.bench.workload import load_template
from sgling.srt.config.gate_args import ContractArgs
from sgling.srt.config.model_path import ASSETS_DIR

CONTRACT = """\
format: 1
name: test
baseline: base.json
scenarios:
  coding:
    dataset: coding
    requests: 4
    bounds: {tpot_p95_ms: baseline * 1.1, ttft_p95_ms: baseline * 1.1, accept_length: baseline - 0.05}
  reports:
    dataset: long_report
    requests: 4
    concurrency: [1, 2]
    runs: [cold, warm]
    bounds:
      tpot_p95_ms: baseline * 1.1
      e2e_p99_ms: {max: 100000}
      fallback_ratio: 0.1
      failed_requests: 0
rollback:
  tpot_p95_ms: 20
"""


@pytest.fixture
def contract_file(tmp_path):
    def write(text: str = CONTRACT):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format: 1", "format: 2", "c.yaml:1: format: this build reads format 1"),
        ("dataset: coding", "dataset: codign", "c.yaml:6: scenarios.coding.dataset: must be one of coding, "),
        (
            "    requests: 4\n    bounds",
            "    request: 4\n    bounds",
            "c.yaml:7: scenarios.coding.request: unknown key; ",
        ),
        ("requests: 4\n    bounds", "requests: 0\n    bounds", "c.yaml:7: scenarios.coding.requests: must be a whole"),
        (
            "baseline - 0.05",
            "baseline / 2",
            "c.yaml:8: scenarios.coding.bounds.accept_length: must be a number or like",
        ),
        (
            "tpot_p95_ms: baseline * 1.1\n",
            "tpot_p95: 3\n",
            "c.yaml:15: scenarios.reports.bounds.tpot_p95: unknown key;",
        ),
        ("{max: 100000}", "{}", "c.yaml:16: scenarios.reports.bounds.e2e_p99_ms: has no bound"),
        ("[cold, warm]", "[cold, hot]", "c.yaml:13: scenarios.reports.runs[1]: must be one of cold, warm, is 'hot'"),
        ("[1, 2]", "1", "c.yaml:12: scenarios.reports.concurrency: must be a list, is a single value"),
        ("baseline: base.json\n", "", "line 7 refers to a baseline, but no baseline file is named"),
        (
            "fallback_ratio: 0.1",
            "invalid_tool_calls: 0",
            "c.yaml:17: scenarios.reports.bounds.invalid_tool_calls: data",
        ),
        ("failed_requests: 0", "e2e_p99_ms: 3", "c.yaml:18: scenarios.reports.bounds.e2e_p99_ms: is given twice"),
        ("  tpot_p95_ms: 20", "  task_success: 1", "c.yaml:20: rollback: task_success has no meaning"),
        ("name: test", "name: [", "c.yaml:4: not YAML"),
        (CONTRACT, "", "c.yaml:1: the file is empty"),
        (CONTRACT, "format: 1\n", "c.yaml:1: needs the key scenarios"),
    ],
)
def test_mistakes_are_explained_by_line(contract_file, old, new, message):
    assert old in CONTRACT
    with pytest.raises(SchemaError) as caught:
        load_contract(contract_file(CONTRACT.replace(old, new, 1)))
    assert message in str(caught.value)


def test_a_contract_is_read_as_written(contract_file):
    contract = load_contract(contract_file())
    coding, reports = contract.scenarios
    assert (coding.concurrency, coding.runs, coding.temperature) == ((1,), ("cold",), 0.0)
    assert (reports.concurrency, reports.runs) == ((1, 2), ("cold", "warm"))
    assert reports.bounds[1] == Bound("e2e_p99_ms", "max", 100000.0, "", 16)
    assert contract.baseline.name == "base.json"
    short = contract.shortened().scenarios[1]
    assert (short.requests, short.output_len, short.concurrency, short.runs) == (2, 256, (1,), ("cold",))


@pytest.mark.parametrize(
    ("bound", "baseline", "limit"),
    [
        (Bound("tpot_p95_ms", "max", 5.0, "", 1), None, 5.0),
        (Bound("tpot_p95_ms", "max", 1.1, "*", 1), 10.0, 11.0),
        (Bound("accept_length", "min", 0.05, "-", 1), 3.0, 2.95),
        (Bound("ttft_p95_ms", "max", 5.0, "+", 1), 3.0, 8.0),
        (Bound("ttft_p95_ms", "max", 5.0, "+", 1), None, None),
    ],
)
def test_bounds(bound, baseline, limit):
    assert bound.limit(baseline) == (None if limit is None else pytest.approx(limit))
    if limit is not None:
        assert bound.holds(limit, baseline)
        assert not bound.holds(limit * (1.01 if bound.side == "max" else 0.99), baseline)


class ScriptedTarget:
    """Answers in virtual time: TPOT 10 ms, TTFT 100 ms, two tokens per step; ``slow`` scenarios take their factor."""

    name = "scripted"

    def __init__(self, slow: dict[str, float] | None = None, accept: int = 1, fallback: int = 0, lossy: bool = False):
        self.slow, self.accept, self.fallback, self.lossy = slow or {}, accept, fallback, lossy
        self.steps = 0

    async def request(self, prompt, options):
        factor = self.slow.get(prompt.label, 1.0)
        is_plain = options.extra.get("speculative") == {"enabled": False}
        result = RequestResult(prompt.input_len, prompt.output_len, prompt.label, success=True, ttft=0.1 * factor)
        result.output_len = prompt.output_len
        result.itl = [0.01 * factor] * (prompt.output_len - 1)
        result.latency = result.ttft + sum(result.itl)
        result.output_ids = [1 if self.lossy and is_plain else 2] * prompt.output_len
        result.text = "text"
        result.meta_info = {"finish_reason": {"type": "stop"}, "spec_verify_ct": 10}
        result.meta_info["spec_num_correct_drafts"] = 10 * self.accept
        self.steps += 10
        return result

    async def info(self):
        return {
            "internal_states": [{"decode_steps": self.steps, "decode_steps_fallback": self.steps * self.fallback // 10}]
        }

    async def flush(self):
        pass


def run(path, target: ScriptedTarget, record: bool = False, short: bool = False):
    """Measure and judge, without a model."""
    directory = ASSETS_DIR / "ling3-pico"
    subject = OpenSubject(target, "scripted", FastTokenizer(directory), load_template(directory))
    contract = load_contract(path)
    args = ContractArgs(record_baseline=record, short=short, disable_tqdm=True)
    return asyncio.run(command.run_contract(args, contract, subject))


def failed(rows) -> list[str]:
    return [f"{row.place} {row.metric}" for row in rows if row.verdict == "fail"]


def test_a_server_slowed_by_a_fifth_in_one_scenario_is_caught_there(contract_file):
    path = contract_file()
    assert run(path, ScriptedTarget(), record=True) is None
    assert failed(run(path, ScriptedTarget())) == []
    rows = run(path, ScriptedTarget(slow={"long_report": 1.2}))
    assert failed(rows) == [f"reports/c{c}/{state} tpot_p95_ms" for c in (1, 2) for state in ("cold", "warm")]
    text = format_rows(rows)
    assert "<= 11 (baseline * 1.1)" in text
    assert text.splitlines()[-1].startswith("FAILED: reports/c1/cold tpot_p95_ms, ")
    assert failed(run(path, ScriptedTarget(slow={"coding": 1.2}))) == [
        "coding/c1/cold tpot_p95_ms",
        "coding/c1/cold ttft_p95_ms",
    ]


def test_a_worse_drafter_breaks_the_promise_on_accept_length(contract_file):
    path = contract_file()
    run(path, ScriptedTarget(accept=2), record=True)
    assert failed(run(path, ScriptedTarget(accept=1))) == ["coding/c1/cold accept_length"]


def test_falling_back_to_width_one_is_seen(contract_file):
    path = contract_file()
    run(path, ScriptedTarget(), record=True)
    rows = run(path, ScriptedTarget(fallback=2))
    assert {row.metric for row in rows if row.verdict == "fail"} == {"fallback_ratio"}
    assert next(row.measured for row in rows if row.metric == "fallback_ratio") == pytest.approx(0.2)


def test_rollback_must_give_the_same_answers(contract_file):
    path = contract_file()
    run(path, ScriptedTarget(), record=True)
    rows = run(path, ScriptedTarget(lossy=True))
    assert failed(rows) == ["rollback ready"]
    assert rows[-1].note == "answer 0 differs with speculation off"


def test_without_a_baseline_relative_bounds_fail_and_say_why(contract_file):
    rows = run(contract_file(), ScriptedTarget())
    assert "coding/c1/cold tpot_p95_ms" in failed(rows)
    assert "no baseline for this cell: --record-baseline" in format_rows(rows)


def test_what_is_not_measured_is_no_kept_promise(contract_file):
    contract = load_contract(contract_file())
    cells = [Cell("coding/c1/cold", "coding", {"tpot_p95_ms": 1.0}, [])]
    rows = judge_contract(contract, cells, Baseline({"coding/c1/cold": {"tpot_p95_ms": 1.0}}, {}), [])
    assert [row.verdict for row in rows] == ["pass", "fail", "fail"]
    assert "not measured" in rows[1].note


def test_failed_requests_fail_a_cell_even_where_nothing_bounds_them(contract_file):
    contract = load_contract(contract_file())
    values = {"tpot_p95_ms": 1.0, "ttft_p95_ms": 1.0, "accept_length": 3.0}
    cells = [Cell("coding/c1/cold", "coding", values, ["HTTP 500"])]
    rows = judge_contract(contract, cells, Baseline({"coding/c1/cold": values}, {}), [Check("golden", "pass", "")])
    assert failed(rows) == ["coding/c1/cold requests"]
    assert rows[-1].metric == "greedy golden"


def test_baselines_round_trip(tmp_path):
    path = tmp_path / "b.json"
    save_baseline(path, [Cell("a/c1/cold", "a", {"tpot_p95_ms": 2.0}, [])], {"device": "cpu"})
    assert load_baseline(path).value("a/c1/cold", "tpot_p95_ms") == 2.0
    assert load_baseline(tmp_path / "none.json").value("a", "b") is None
    path.write_text('{"format": 0}')
    with pytest.raises(ValueError, match="not a baseline"):
        load_baseline(path)


def test_the_report_is_machine_readable(contract_file, monkeypatch, tmp_path, capsys):
    rows = run(contract_file(), ScriptedTarget())

    async def judged(_args, _contract):
        return rows

    monkeypatch.setattr(command, "_run", judged)
    out = tmp_path / "report.json"
    assert command.main([str(contract_file()), "--json", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["passed"] is False
    assert report["failed"] == failed(rows)
    assert command.main([str(contract_file("scenarios: {}\nformat: 1\n"))]) == 1
    assert "c.yaml:1: scenarios: has no scenario" in capsys.readouterr().err


def test_counters_a_server_does_not_have_are_not_zero():
    assert decode_steps({}) == (0, 0)
    state = {"decode_steps": 10, "decode_steps_fallback": 3}
    assert decode_steps({"internal_states": [state]}) == (10, 3)
    assert "fallback_ratio" not in cell_values([], [], (0, 0))


def test_broken_tool_calls():
    directory = ASSETS_DIR / "ling3-pico"
    sample = scenario_samples(("tool_calling",), 1, 1)[0]
    prompt = scenario_prompt(sample, load_template(directory), FastTokenizer(directory), 8)

    def answer(text: str) -> bool:
        return has_invalid_call(prompt, RequestResult(1, 1, success=True, text=text))

    assert not answer("no call at all")
    assert answer("<tool_call>not_offered</tool_call>")
    assert answer(f"<tool_call>{sample.tools[0]['function']['name']}")
    assert Prompt([1], "x", 1).tools is None


def test_the_packaged_contract_is_valid_and_has_a_short_form():
    contract = load_contract(packaged_file(command.PACKAGED_CONTRACT))
    assert {scenario.dataset for scenario in contract.scenarios} >= {"coding", "tool_calling", "long_report", "zh_chat"}
    assert len(contract.shortened().scenarios) == len(contract.scenarios)


def test_cells_are_measured_in_order(contract_file):
    directory = ASSETS_DIR / "ling3-pico"
    subject = OpenSubject(ScriptedTarget(), "scripted", FastTokenizer(directory), load_template(directory))
    names: list[str] = []
    cells = asyncio.run(measure_contract(load_contract(contract_file()), subject, names.append))
    assert [cell.name for cell in cells] == names
    assert names[0] == "coding/c1/cold"
    assert names[-1] == "rollback"
