"""Conformance 13 (docs/dspark.md §8): temperatures are recovered, written, read and refused; flags of scheduling."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from model.tiny_drafter import write_tiny_drafter
from model.tiny_model import write_tiny_checkpoint
from sgling.fit_confidence import main as fit_main
from sgling.fit_confidence import read_prompts
from sgling.srt.config.depth_table import DepthTable
from sgling.srt.config.draft_model import complete_args
from sgling.srt.config.dspark_tables import read_sps_table, read_temperatures
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.speculative.sts import GRID, calibration_error, fit_temperatures
from sgling.sweep_rows import main as sweep_main
from sgling.sweep_rows import rates
from spec.dspark_harness import dspark
from spec.harness import random_prompt, request


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)


def synthetic_rounds(scales: np.ndarray, count: int = 60_000):
    """Logits that are ``scales`` times too sharp, and accepted lengths drawn from the true probabilities."""
    rng = np.random.default_rng(0)
    true = rng.normal(0.8, 1.5, (count, len(scales)))
    hits = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    return true * scales, np.cumprod(hits, axis=1).sum(1)


def test_13_fit_recovers_known_scaling():
    scales = np.array([2.0, 0.5, 1.0, 4.0])
    result = fit_temperatures(*synthetic_rounds(scales))
    np.testing.assert_allclose(np.array(result.temperatures) / scales, 1.0, atol=0.3)
    assert result.num_samples == 60_000
    assert result.ece_after[0] <= result.ece_before[0]
    assert max(result.ece_after) < 0.02 < max(result.ece_before)
    assert set(result.temperatures) <= set(GRID.tolist())


def test_13_calibration_error_by_hand():
    assert calibration_error(np.array([0.9, 0.9, 0.1, 0.1]), np.array([1, 0, 0, 0])) == pytest.approx(0.25)
    assert calibration_error(np.array([1.0, 0.0]), np.array([1, 0])) == 0.0


def test_13_a_table_of_another_block_size_is_refused(target, tmp_path):
    drafter = write_tiny_drafter(tmp_path / "d", block_size=4)
    file = tmp_path / "sts.json"
    for temperatures, message in (
        ([1.0] * 3, "3 temperatures, the drafter's block size is 4"),
        ([1.0, 0.0], "positive"),
    ):
        file.write_text(json.dumps({"temperatures": temperatures}))
        with pytest.raises(ServerArgsError, match=message):
            dspark(target, drafter, speculative_dspark_confidence_sts_path=str(file))
    file.write_text(json.dumps({"temperatures": [2.0, 1.0, 0.5, 1.0]}))
    harness = dspark(target, drafter, speculative_dspark_confidence_sts_path=str(file), speculative_dspark_block_size=3)
    assert harness.core.args.spec.dspark.temperatures == (2.0, 1.0, 0.5)


def test_13_fit_command_writes_what_the_server_reads(target, tmp_path, capsys):
    drafter = write_tiny_drafter(tmp_path / "d", block_size=4)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "sts.json"
    prompts.write_text("\n".join(json.dumps({"input_ids": random_prompt(9, i)}) for i in range(6)))
    paths = {"model-path": target, "speculative-draft-model-path": drafter, "prompts": prompts, "output": output}
    argv = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    argv += "--device cpu --speculative-algorithm DSPARK --max-new-tokens 12".split()
    assert fit_main(argv) == 0
    data = json.loads(output.read_text())
    assert set(data) == {"dataset", "temperatures", "num_samples", "ece_before", "ece_after"}
    assert data["num_samples"] > 6
    assert read_temperatures(str(output), 4) == tuple(data["temperatures"])
    assert "rounds; wrote" in capsys.readouterr().out
    prompts.write_text('{"prompt": "text"}')
    assert fit_main(argv) == 1
    assert "needs a model with a tokenizer" in capsys.readouterr().err
    prompts.write_text('{"text": "of another key"}')
    with pytest.raises(ServerArgsError, match="line 1: needs prompt or input_ids"):
        read_prompts(str(prompts), SimpleNamespace(encode=list))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1]}, "one length"),
        ({"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1, 1]}, "must increase"),
        ({"sample_batch_tokens": [1], "sample_steps_per_sec": [0]}, "positive"),
        ([1], "JSON object"),
    ],
)
def test_bad_step_tables_are_refused(tmp_path, content, message):
    file = tmp_path / "sps.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ServerArgsError, match=message):
        read_sps_table(str(file))


def test_row_rates_take_the_slower_of_overlapping_batches_and_never_rise():
    table = rates(DepthTable("test", {1: (4.0, 5.0, 4.5, 9.0), 2: (6.0, 7.0, 8.0, 9.0)}, {}))
    assert table.rows == (1, 2, 3, 4, 6, 8)
    assert [1000 / rate for rate in table.steps_per_sec] == pytest.approx([4.0, 6.0, 6.0, 9.0, 9.0, 9.0])


def test_sweep_rows_writes_a_table_that_scheduling_reads(target, tmp_path, capsys, monkeypatch):
    drafter, output = write_tiny_drafter(tmp_path / "drafter"), tmp_path / "sps.json"
    argv = ["--model-path", str(target), "--speculative-draft-model-path", str(drafter), "--output", str(output)]
    argv += "--device cpu --speculative-algorithm DSPARK --max-running-requests 2".split()
    assert sweep_main(argv) == 0
    assert f"wrote {output}" in capsys.readouterr().out
    table = read_sps_table(str(output))
    assert table.rows == (1, 2, 3, 4, 5)  # batch 1 of the measured sizes, widths 1 to 5
    assert list(table.steps_per_sec) == sorted(table.steps_per_sec, reverse=True)
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    harness = dspark(target, drafter, speculative_dspark_sps_table_path=str(output))
    items = [request(f"r{i}", random_prompt(9, i), max_new_tokens=8) for i in range(2)]
    assert all(len(outcome.ids) == 8 for outcome in harness.run(*items).values())
    assert sweep_main(["--model-path", str(target), "--device", "cpu"]) == 1
    assert "needs --speculative-algorithm DSPARK" in capsys.readouterr().err


def test_a_simulated_accept_length_cannot_be_scheduled(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    drafter = write_tiny_drafter(tmp_path, block_size=8)
    harness = dspark(target, drafter)
    harness.run(request("r", random_prompt(9, 1), max_new_tokens=60))
    assert 3 <= harness.core.stats.avg_accept_length <= 4
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with pytest.raises(ValueError, match="SGLANG_SIMULATE_ACC_LEN"):
        dspark(target, drafter)


def test_scheduling_needs_a_confidence_head_and_a_known_mode(target, tmp_path, monkeypatch):
    drafter = write_tiny_drafter(tmp_path, enable_confidence_head=False)

    def resolve(**kwargs):
        args = ServerArgs.from_kwargs(model_path=str(target), device="cpu", speculative_algorithm="DSPARK",
                                      speculative_draft_model_path=str(drafter), **kwargs)  # fmt: skip
        return complete_args(args)

    assert resolve().spec.dspark.scheduled is False
    with pytest.raises(ServerArgsError, match="--speculative-depth confidence: the drafter has no confidence head"):
        resolve(speculative_depth="confidence")
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    with pytest.raises(ServerArgsError, match="SGLANG_RAGGED_VERIFY_MODE=compact: the drafter has no confidence head"):
        resolve()
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "ragged")
    with pytest.raises(ServerArgsError, match="known are static, compact, cap-accept"):
        resolve()
