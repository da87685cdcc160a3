"""The depth sweep: hand-made grids are judged by the break-even rule, and a scripted target is swept end to end."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from sgling.bench.datasets import Prompt
from sgling.bench.depth_grid import DepthPoint, format_grid, make_point, margins, recommend
from sgling.bench.depth_sweep import Subject, main, make_prompts, sweep, table_of
from sgling.bench.result import RequestResult
from sgling.bench.target import BenchError
from sgling.srt.config.depth_table import DepthTable
from sgling.srt.config.sweep_args import SweepArgs


def points(*pairs: tuple[float, float]) -> list[DepthPoint]:
    """(accept length, step ms) at widths 1, 2, ..."""
    return [make_point(1, i + 1, [(step / accept, accept)]) for i, (accept, step) in enumerate(pairs)]


def test_the_published_sweep_is_judged_as_published():
    """Published depth sweep: 3/4 -> accept 3.11 at 4.70 ms, 4/5 -> 3.37 at 4.89, 5/6 -> 3.45 at 5.35."""
    grid = points((3.11, 4.70), (3.37, 4.89), (3.45, 5.35))
    _, fifth, sixth = margins(grid)
    assert fifth.pays and not sixth.pays
    assert (round(fifth.accept, 3), round(fifth.cost, 3)) == (0.084, 0.040)
    assert recommend(grid)[0].width == 2


def test_noise_recommends_the_shallower_draft():
    best, reason = recommend(points((1.0, 10.0), (2.0, 12.0), (2.5, 14.95)))
    assert best.width == 2 and "within noise" in reason


def test_speculation_that_loses_is_turned_off_with_its_break_even():
    best, reason = recommend(points((1.0, 10.0), (1.1, 14.0)))
    assert best.steps == 0 and "accept length above 1.40 and have 1.10" in reason


def test_the_fastest_repeat_counts_and_the_spread_is_said():
    point = make_point(1, 3, [(4.0, 2.0), (5.0, 3.0)])
    assert (point.tpot_ms, point.accept, point.step_ms, point.spread) == (4.0, 2.5, 10.0, 0.25)


def test_the_table_names_what_pays():
    rows = format_grid(points((1.0, 10.0), (1.8, 12.0), (1.9, 15.0))).splitlines()
    assert len(rows) == 4
    assert rows[2].endswith("pays") and not rows[2].endswith("not pay")
    assert rows[3].endswith("does not pay")


class ScriptedTarget:
    """Steps of width w take 10 + 2 w ms and commit min(w, 3) tokens."""

    name = "scripted"

    async def request(self, prompt: Prompt, options) -> RequestResult:
        width = options.extra.get("speculative", {}).get("max_width", 5)
        result = RequestResult(prompt.input_len, prompt.output_len, success=True)
        steps, accept = 20, min(width, 3)
        result.output_len, result.ttft = 1 + steps * accept, 0.1
        result.latency = 0.1 + steps * (10 + 2 * width) / 1000
        result.meta_info = {"spec_verify_ct": steps, "spec_num_correct_drafts": steps * (accept - 1)}
        return result


def run_sweep(argv: str) -> tuple[dict, SweepArgs]:
    args = SweepArgs.from_argv(argv.split())
    subject = Subject(ScriptedTarget(), 5, [Prompt([1, 2], None, 61)] * 2, "scripted")
    return asyncio.run(sweep(subject, args)), args


def test_a_sweep_finds_the_scripted_costs_and_writes_a_readable_table(tmp_path):
    grid, args = run_sweep("--concurrency 1 2 --repeats 1")
    assert [round(point.step_ms, 6) for point in grid[2]] == [12, 14, 16, 18, 20]
    assert [point.accept for point in grid[1]] == [1, 2, 3, 3, 3]
    data = json.loads(json.dumps(table_of(grid, args, "scripted")))
    assert data["sweep"]["1"]["recommended_steps"] == 2
    table = DepthTable.from_json(data)
    assert (table.max_width, sorted(table.step_ms)) == (5, [1, 2])
    assert table.break_even(1, 3) == pytest.approx(16 / 12)


def test_a_failing_request_ends_the_sweep():
    class Failing(ScriptedTarget):
        async def request(self, prompt, options):
            return RequestResult(2, 5, error="out of order")

    subject = Subject(Failing(), 2, [Prompt([1], None, 5)], "x")
    with pytest.raises(BenchError, match="out of order"):
        asyncio.run(sweep(subject, SweepArgs.from_argv([])))


def test_usage_errors(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--repeats", "0"])
    assert ended.value.code == 2 and "--repeats" in capsys.readouterr().err
    assert main(["--scenario", "nothing"]) == 1
    assert "unknown scenario 'nothing'" in capsys.readouterr().err


def test_an_engine_is_swept(tmp_path, capsys):
    """The embedded model's shape with random weights: two widths, one prompt."""
    out = tmp_path / "table.json"
    argv = f"ling3-pico --load-format dummy --max-steps 1 --prompts 1 --output-len 6 --repeats 1 --output {out}"
    assert main(argv.split()) == 0
    assert "recommended: --speculative-num-steps" in capsys.readouterr().out
    assert DepthTable.from_json(json.loads(out.read_text())).max_width == 2


@pytest.mark.parametrize("gpu", [False, True])
def test_the_swept_engine_never_chooses_by_itself(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    args = SweepArgs.from_argv("--speculative-depth auto --max-steps 4 --page-size 2".split())
    graphs = {"cuda_graph_max_bs_decode": 1, "cuda_graph_all_widths": True} if gpu else {}
    drafts = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 4}
    assert args.engine_flags() == {"page_size": 2, **graphs, **drafts}


def test_prompts_are_held_out_scenarios():
    from sgling.bench.tokenizer import FastTokenizer
    from sgling.srt.config.model_path import ASSETS_DIR

    directory = ASSETS_DIR / "ling3-pico"
    args = SweepArgs.from_argv(["--prompts", "3"])
    prompts = make_prompts(args, FastTokenizer(directory), directory)
    assert len(prompts) == 3 and len({prompt.text for prompt in prompts}) == 3
