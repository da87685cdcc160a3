"""The correctness gate passes a sound engine, and catches and names each planted fault."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.faulty_engine import accept_first_draft, faulty_engine, leak_state
from model.tiny_model import write_tiny_checkpoint
from sgling.bench.datasets import Prompt
from sgling.bench.gate import correctness_command
from sgling.bench.gate.correctness import Check, check_all, check_speculation, record
from sgling.bench.gate.golden import Golden, first_difference
from sgling.bench.result import RequestResult
from sgling.bench.target import BenchError, EngineTarget

TOKENS = 24
PROMPTS = [Prompt([10 + i, 40 + 3 * i, 7, 99, 5 + i], None, TOKENS, label=f"prompt{i}") for i in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def golden(model) -> Golden:
    """Recorded on a sound engine whose drafter knows two of three candidates."""
    with faulty_engine(model) as engine:
        plain = asyncio.run(record(EngineTarget(engine), "tiny", PROMPTS))
    truth = truth_of(plain)
    with faulty_engine(model, truth) as engine:
        return asyncio.run(record(EngineTarget(engine), "tiny", PROMPTS))


def truth_of(golden: Golden) -> dict:
    return {tuple(answer.input_ids): answer.output_ids for answer in golden.answers}


def run_gate(model, golden: Golden, **changes) -> dict[str, Check]:
    with faulty_engine(model, truth_of(golden), **changes) as engine:
        return {check.name: check for check in asyncio.run(check_all(EngineTarget(engine), golden))}


def failed(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.status == "fail"}


def test_a_sound_engine_passes_every_check(model, golden):
    checks = run_gate(model, golden)
    assert {check.status for check in checks.values()} == {"pass"}
    assert golden.accept_length > 2.5
    assert all(len(answer.output_ids) == TOKENS for answer in golden.answers)


def test_a_polluted_state_is_caught_by_the_state_check(model, golden):
    checks = run_gate(model, golden, fault=leak_state)
    assert "state" in failed(checks)
    assert "token" in checks["state"].detail
    assert checks["golden"].status == "pass"  # before any temperature request all was well


def test_a_lossy_verdict_is_caught_by_golden_speculation_and_argmax(model, golden):
    checks = run_gate(model, golden, fault=accept_first_draft, wrong_from=0)
    assert failed(checks) >= {"golden", "speculation", "argmax"}
    assert "nats below the best" in checks["argmax"].detail
    assert "prompt0" in checks["golden"].detail


def test_a_worse_drafter_is_caught_by_accept_length_alone(model, golden):
    checks = run_gate(model, golden, wrong_from=1)
    assert failed(checks) == {"accept_length"}
    assert "recorded" in checks["accept_length"].detail


def test_an_engine_without_speculation_skips_what_needs_it(model, golden):
    with faulty_engine(model, speculative_algorithm=None) as engine:
        checks = {check.name: check.status for check in asyncio.run(check_all(EngineTarget(engine), golden))}
    skipped = {name for name, status in checks.items() if status == "skip"}
    assert skipped == {"accept_length", "speculation"}
    assert set(checks.values()) == {"pass", "skip"}


def test_a_golden_is_not_recorded_from_a_lossy_server(model, golden):
    with (
        faulty_engine(model, truth_of(golden), wrong_from=0, fault=accept_first_draft) as engine,
        pytest.raises(BenchError, match="nothing is recorded"),
    ):
        asyncio.run(record(EngineTarget(engine), "tiny", PROMPTS))


def test_near_ties_cut_a_portable_golden(model, golden):
    with faulty_engine(model) as engine:
        cut = asyncio.run(record(EngineTarget(engine), "tiny", PROMPTS, tie_margin=0.5))
    for short, full in zip(cut.answers, golden.answers, strict=True):
        assert 1 <= len(short.output_ids) <= TOKENS
        assert full.output_ids[: len(short.output_ids)] == short.output_ids
    assert sum(len(answer.output_ids) for answer in cut.answers) < len(PROMPTS) * TOKENS


def test_a_server_that_ignores_the_switch_is_not_called_invariant(golden):
    class Foreign:
        """Answers the golden, and never says how wide its steps were."""

        async def request(self, prompt, _options):
            ids = truth_of(golden)[tuple(prompt.ids)]
            return RequestResult(5, TOKENS, success=True, output_ids=ids)

        async def info(self):
            return {}

    prompts = [answer.prompt() for answer in golden.answers]
    check = asyncio.run(check_speculation(Foreign(), None, prompts, golden.answers))
    assert check.status == "skip"
    assert "--plain-url" in check.detail
    assert asyncio.run(check_speculation(Foreign(), Foreign(), prompts, golden.answers)).status == "pass"


def test_golden_files_round_trip(golden, tmp_path):
    path = tmp_path / "golden.json"
    golden.save(path)
    assert Golden.load(path) == golden
    part = golden.first(1, 5)
    assert (part.accept_length, len(part.answers), len(part.answers[0].output_ids)) == (None, 1, 5)
    path.write_text('{"format": 99}')
    with pytest.raises(ValueError, match="not a golden file"):
        Golden.load(path)


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == "token 1 is 3, not 2"
    assert first_difference([1, 2], [1]) == "1 tokens, not 2"


def test_the_command_names_what_failed(monkeypatch, tmp_path, capsys):
    async def checks(_args):
        return [Check("golden", "pass", "equal"), Check("state", "fail", "token 3")]

    monkeypatch.setattr(correctness_command, "run_checks", checks)
    report = tmp_path / "report.json"
    assert correctness_command.main(["--json", str(report)]) == 1
    assert capsys.readouterr().out.endswith("FAILED: state\n")
    assert json.loads(report.read_text())["passed"] is False


def test_usage_errors():
    with pytest.raises(SystemExit):
        correctness_command.main(["--record"])
    with pytest.raises(SystemExit):
        correctness_command.main(["--tokens", "0"])
