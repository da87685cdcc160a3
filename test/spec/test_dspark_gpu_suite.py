"""The GPU's DSPARK suite on a CPU: tiny model, fp32, graphs replaced by the functions they recorded."""

from __future__ import annotations

import pytest

from gpu.gpu_case import Bed, Setup
from gpu.test_dspark_lossless import CASES, TRAINED_FLOOR, Beds, trained_accept_lengths
from model.tiny_model import write_tiny_checkpoint
from sgling.srt.config.model_path import EMBEDDED_DRAFTERS
from spec.fake_graphs import Recorded


@pytest.fixture(scope="module")
def beds(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    tiny = write_tiny_checkpoint(directory / "tiny")

    def make(name, where, device):
        (where / name).mkdir()
        return Bed(name, where / name, device, tiny)

    return Beds(directory, "cpu", make)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: "-".join(map(str, case)))
def test_output_is_that_of_plain_decoding(beds, fake_cuda, case):
    ids, truth, _ = beds.play(case)
    assert ids == truth
    assert (Recorded.replays > 0) == (case.graphs and case.verify == "static")


@pytest.mark.parametrize("name", EMBEDDED_DRAFTERS)
def test_the_trained_drafter_is_accepted_alone_and_in_a_batch(tmp_path, fake_cuda, name):
    """As on a GPU behind the suite's other drafters, which tap other layers of the target."""
    bed = Bed("pico", tmp_path, "cpu")
    assert bed.harness(Setup("DSPARK")).core.runner.model.tap_layers == (0, 3, 6)
    alone, together = trained_accept_lengths(bed, name)
    assert alone == together > TRAINED_FLOOR
    assert Recorded.replays > 0
