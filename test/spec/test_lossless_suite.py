"""The GPU's lossless suite on a CPU: tiny model, fp32, graphs replaced by the functions they recorded."""

from __future__ import annotations

import pytest

from gpu import test_no_sync
from gpu.gpu_case import BUCKETS, PLAIN, Bed, Play, Setup
from gpu.lossless_design import AXES, covering, name_of
from gpu.test_lossless import oracle_tokens
from model.tiny_model import write_tiny_checkpoint
from spec.fake_graphs import Recorded


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return Bed("tiny", directory, "cpu", write_tiny_checkpoint(directory / "tiny"))


CASES = covering()


@pytest.mark.parametrize("case", CASES[::5], ids=name_of)
def test_output_is_that_of_plain_decoding(bed, fake_cuda, case):
    setup, play = case
    assert bed.run(setup, play)[0] == bed.truth(setup.kernels)
    assert (Recorded.replays > 0) == setup.graphs


@pytest.mark.parametrize("name", test_no_sync.CASES)
def test_graphs_cover_every_step_that_the_gpu_watches_for_blocking_reads(bed, fake_cuda, name):
    setup, params = test_no_sync.CASES[name]
    harness = bed.harness(setup)
    harness.send(test_no_sync.long_request(params, bed.vocab))
    for _ in range(4):
        harness.step()
    assert harness.core.decode_steps > 0 and not harness.scheduler.graphs.ran_eagerly
    assert harness.scheduler.worker.metadata.name == setup.metadata


@pytest.mark.parametrize("width", [3])
def test_every_accept_length_occurs_under_the_oracle(bed, fake_cuda, width):
    ids, accepted = bed.run(Setup(width=width), Play("oracle", 4), oracle_tokens(width, 5))
    assert ids == bed.truth("cuda", oracle_tokens(width, 5))
    assert sorted(accepted) == list(range(1, width + 1)) and min(accepted.values()) >= 5


def test_a_wrong_token_is_found(bed, fake_cuda, monkeypatch):
    """The instrument works: a verify that accepts a wrong draft changes the ids."""
    truth = bed.truth("cuda")
    from sgling.srt.speculative.chain_worker import ChainWorker

    judge = ChainWorker.judge

    def careless(self, window, step):
        verdict = judge(self, window, step)
        return verdict._replace(target_ids=window.candidates.roll(-1, 1), bonus=window.candidates[:, -1])

    monkeypatch.setattr(ChainWorker, "judge", careless)
    assert bed.run(Setup(), Play("random", 1))[0] != truth


def test_the_covering_design_covers():
    """Every pair of values occurs among the speculative cases, and is not forgotten for a graph of four."""
    speculative = [case for case in CASES if case[0].algorithm != "none"]
    seen = {(a, b) for setup, play in speculative for a in setup + play for b in setup + play if a != b}
    for first in AXES["metadata"]:
        for second in (*AXES["relay"], *AXES["drafter"], *AXES["rollback"], *AXES["algorithm"], *AXES["batch"]):
            assert (first, second) in seen
    assert {setup.width for setup, _ in speculative} == set(AXES["width"])
    assert any(setup == PLAIN for setup, _ in CASES) or any(setup.algorithm == "none" for setup, _ in CASES)
    assert max(AXES["batch"]) == BUCKETS[-1]
