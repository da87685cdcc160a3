"""A/B: real differences are found, noise is called noise, peaks play no part, workloads must match."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from bench.scripted_server import chunk, with_server
from sgling.bench import ab_command
from sgling.bench.ab import Run, compare, figures, read_runs, run_of_requests, verdict

STEP_MS = 5.0


def run(seed: int, count: int = 60, step_ms: float = STEP_MS, accept: float = 3.0, noise: float = 0.01) -> Run:
    """Requests whose accept lengths differ a lot (0.6) and whose step time differs by ``noise``."""
    workload, machine = np.random.default_rng(7), np.random.default_rng(seed)
    accepts = accept + workload.normal(0, 0.6, count)
    steps = workload.integers(20, 80, count).astype(float)  # answers of very different lengths
    tpot = step_ms * (1 + machine.normal(0, noise, count)) / accepts
    return Run(tpot, accepts * steps, steps)


def judge(a: Run, b: Run, **options):
    result = compare([a], [b], paired=True, interleaved=True, resamples=400, **options)
    return result, verdict(result, 0.01)


def test_figures_by_hand():
    one = run_of_requests(
        [
            {"tpot_ms": 2.0, "committed": 30, "verify_steps": 10},
            {"tpot_ms": 6.0, "committed": 30, "verify_steps": 20},
            {"tpot_ms": None, "committed": 0, "verify_steps": 0},
        ]
    )
    found = figures([one])
    assert (found.tpot, found.accept, found.step) == (4.0, 2.0, 8.0)  # equally long: the product of the means
    plain = run_of_requests([{"tpot_ms": 2.0, "committed": 0, "verify_steps": 0}])
    assert figures([plain]).step == 2.0  # without speculation a step is a token


def test_a_faster_step_is_found_through_the_luck_of_the_drafts():
    result, decided = judge(run(1), run(2, step_ms=STEP_MS * 0.97))
    assert decided.outcome == "faster"
    assert result.step.value == pytest.approx(0.97, abs=0.005)
    assert judge(run(2, step_ms=STEP_MS * 0.97), run(1))[1].outcome == "slower"


def test_the_same_build_twice_is_noise():
    for seed in range(5):
        assert judge(run(seed), run(seed + 10))[1].outcome == "same"


def test_a_noisy_machine_gives_no_verdict():
    _, decided = judge(run(1, count=12, noise=0.3), run(2, count=12, noise=0.3))
    assert decided.outcome == "undecided"
    assert "hides anything below" in decided.text


def test_a_worse_drafter_is_not_taken_for_a_slower_runtime():
    # every step costs the same; TPOT rises because fewer drafts are accepted
    result, decided = judge(run(1), run(2, accept=2.6))
    assert result.tpot.value > 1.1
    assert decided.outcome == "same"
    assert decided.accept_changed
    assert "not a runtime-only change" in decided.text


def test_drift_inside_a_lone_run_widens_the_interval():
    steady, tired = run(1), run(2)
    tired = tired._replace(tpot_ms=tired.tpot_ms * np.linspace(0.95, 1.1, len(tired.tpot_ms)))
    alone = compare([steady], [tired], paired=True, interleaved=False, resamples=200)
    together = compare([steady], [tired], paired=True, interleaved=True, resamples=200)
    assert together.drift == 0 < alone.drift
    assert alone.step.high - alone.step.low > together.step.high - together.step.low
    assert verdict(alone, 0.01).outcome == "undecided"


def test_several_runs_carry_their_own_spread():
    # two runs per side that differ by 6 % among themselves: a 2 % difference between sides is nothing
    a = [run(1), run(2, step_ms=STEP_MS * 1.06)]
    b = [run(3, step_ms=STEP_MS * 1.02), run(4, step_ms=STEP_MS * 1.08)]
    result = compare(a, b, paired=True, interleaved=False, resamples=400)
    assert result.drift == 0
    assert verdict(result, 0.01).outcome == "undecided"


def record(run: Run, peak: int = 100, **changes) -> dict:
    requests = [
        {"tpot_ms": tpot, "committed": committed, "verify_steps": steps}
        for tpot, committed, steps in zip(*(field.tolist() for field in run), strict=True)
    ]
    own = {"seed": 42, "cache_state": "cold", "requests": requests}
    return {"dataset_name": "coding", "max_concurrency": 1, "max_output_tokens_per_s": peak, "sgling": own, **changes}


def write(path, *records) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return str(path)


def test_records_are_compared_and_peaks_ignored(tmp_path, capsys):
    a = write(tmp_path / "a.json", record(run(1), peak=900))
    b = write(tmp_path / "b.json", record(run(2, step_ms=STEP_MS * 1.05), peak=2000))
    out = tmp_path / "out.json"
    assert ab_command.main([a, b, "--fail-if-slower", "--json", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "verdict: B is slower" in shown
    assert "peak" not in shown.lower()
    assert json.loads(out.read_text())["outcome"] == "slower"
    assert ab_command.main([a, b]) == 0


def test_records_that_cannot_be_compared(tmp_path, capsys):
    a = write(tmp_path / "a.json", record(run(1)))
    other = write(tmp_path / "b.json", record(run(2), dataset_name="zh_chat"))
    assert ab_command.main([a, other]) == 1
    assert "dataset_name coding and zh_chat" in capsys.readouterr().err
    assert ab_command.main([a, other, "--different-workloads"]) == 0
    empty = write(tmp_path / "c.json", record(run(2)) | {"sgling": {}})
    assert ab_command.main([a, empty]) == 1
    assert "--output-details" in capsys.readouterr().err
    nothing = write(tmp_path / "d.json", record(Run(*np.full((3, 2), np.nan))))
    assert ab_command.main([a, nothing]) == 1
    assert "no request has a TPOT" in capsys.readouterr().err


def test_upstreams_detailed_records_are_read(tmp_path):
    details = {"itls": [[0.002, 0.004], []], "accept_length": 2.5}
    (one,), _ = read_runs(write(tmp_path / "a.json", details))
    assert figures([one]).tpot == pytest.approx(3.0)
    assert figures([one]).accept == 2.5


@pytest.mark.parametrize("argv", [[], ["a.json"], ["a.json", "--seed"], ["http://a", "b.json"], ["--fail-if-slower"]])
def test_usage(argv):
    with pytest.raises(SystemExit) as caught:
        ab_command.main(argv)
    assert caught.value.code == 2


def test_two_servers_are_measured_in_turn(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    answer = [chunk("a", 1) + b"\n\n", chunk("ab", 2, True) + b"\n\n", b"data: [DONE]\n\n"]
    answers = {
        "/v1/models": (200, [b'{"data": [{"id": "m"}]}']),
        "/model_info": (200, [json.dumps({"tokenizer_path": str(tmp_path)}).encode()]),
        "/generate": (200, answer),
    }
    flags = "--dataset-name random-ids --tokenize-prompt --num-prompts 4 --random-input-len 3 --random-output-len 2"
    flags += f" --output-file {tmp_path}/out.jsonl --resamples 50"

    async def use(url, server):
        status = await asyncio.to_thread(ab_command.main, [url, url + "/", *flags.split()])
        return status, [body["input_ids"] for path, body in server.asked if path == "/generate"]

    status, asked = with_server(answers, use)
    assert status == 0
    assert asked[2::2] == asked[3::2]  # after two warm-ups every prompt goes to both, back to back
    assert "same prompts, paired" in capsys.readouterr().out
    tags = [json.loads(line)["tag"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert tags == ["A", "B"]
