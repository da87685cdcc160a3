"""Losslessness of DSPARK on a GPU over what only it has: kinds of drafters, block sizes, and scheduled verifies.

The suite of test_lossless.py crosses algorithms with graphs, kernels and relays; this one crosses the drafter's forms.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu.gpu_case import MODELS, Bed, Play, Setup
from model.tiny_drafter import MLA
from sgling.srt.config.model_path import EMBEDDED_DRAFTERS
from spec.dspark_harness import use_drafts
from spec.harness import Harness
from spec.invariance import pairwise

TRAINED_FLOOR = 2.0  # two of the four requests sample: a mean far below that of greedy template text
STEP_RATES = {"sample_batch_tokens": [1, 8, 17, 34, 68], "sample_steps_per_sec": [200, 190, 160, 120, 80]}
AXES = {
    "model": MODELS,
    "form": ("multi-head", "grouped", "latent", "sliding"),
    "block": (1, 4, 8, 16),
    "verify": ("static", "compact", "cap-accept"),
    "drafter": ("own", "random", "wrong", "oracle"),
    "rollback": ("replay", "staged"),
    "graphs": (True, False),
    "batch": (1, 4),
}


class Case(NamedTuple):
    """One value of each axis; scheduled verifies run without graphs whatever ``graphs`` says."""

    model: str
    form: str
    block: int
    verify: str
    drafter: str
    rollback: str
    graphs: bool
    batch: int


CASES = [Case(*values) for values in pairwise(AXES)]


def forms(config: dict) -> dict[str, dict]:
    """What each kind of drafter changes in the config of a bed's own drafter (a target's config for its sizes)."""
    dense = {"kv_lora_rank": None, "head_dim": config["head_dim"]}
    latent = {key: config[key] for key in MLA}
    sliding = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 20, "markov_head_type": "rnn"}
    return {
        "multi-head": {**dense, "num_key_value_heads": config["num_attention_heads"]},
        "grouped": {**dense, "num_key_value_heads": 2, "rope_is_neox_style": False, "partial_rotary_factor": 0.5},
        "latent": {**latent, "markov_head_type": "gated"},
        "sliding": {**dense, "num_key_value_heads": 2, **sliding},
    }


def write_forms(bed: Bed, directory: Path) -> dict[str, Path]:
    """A directory per form with config.json only: the bed's drafter, changed."""
    own = json.loads((bed.drafter / "config.json").read_text(encoding="utf-8"))
    paths = {}
    for name, changes in forms(bed.config).items():
        paths[name] = directory / f"{bed.name}-{name}"
        paths[name].mkdir()
        heads = {key: changes.pop(key) for key in list(changes) if key in own["dspark_config"]}
        config = {**own, **changes, "dspark_config": {**own["dspark_config"], **heads}}
        (paths[name] / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return paths


class Beds:
    """The beds by model name, with the drafters of every form; made when first asked for."""

    def __init__(self, directory: Path, device: str, make=Bed):
        self._directory, self._device, self._make = directory, device, make
        self._known: dict[str, tuple[Bed, dict[str, Path]]] = {}
        self.rates = directory / "rates.json"
        self.rates.write_text(json.dumps(STEP_RATES), encoding="utf-8")

    def __call__(self, name: str) -> tuple[Bed, dict[str, Path]]:
        if name not in self._known:
            bed = self._make(name, self._directory, self._device)
            self._known[name] = (bed, write_forms(bed, self._directory))
        return self._known[name]

    def play(self, case: Case) -> tuple[dict[str, list[int]], dict[str, list[int]], Counter]:
        """(ids, those of plain decoding, how often each accept length occurred) of one case."""
        bed, drafters = self(case.model)
        graphs = case.graphs and case.verify == "static"
        setup = Setup("DSPARK", case.block + 1, rollback=case.rollback, graphs=graphs)
        server = {
            "speculative_draft_model_path": str(drafters[case.form]),
            "speculative_dspark_sps_table_path": str(self.rates),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_RAGGED_VERIFY_MODE", case.verify)
            use = Harness.use_drafter if case.verify == "static" else use_drafts
            ids, accepted = bed.run(setup, Play(case.drafter, case.batch), use_drafts=use, **server)
        return ids, bed.truth("cuda"), accepted


@pytest.fixture(scope="module")
def beds(tmp_path_factory):
    return Beds(tmp_path_factory.mktemp("models"), "cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_output_is_that_of_plain_decoding(beds, case):
    ids, truth, accepted = beds.play(case)
    assert ids == truth
    if case.drafter == "oracle" and case.verify == "static":
        assert len(accepted) > 1, accepted


def test_every_form_block_and_verify_mode_meets_every_other():
    for first, second in (("form", "block"), ("form", "verify"), ("block", "verify"), ("form", "model")):
        pairs = {(getattr(case, first), getattr(case, second)) for case in CASES}
        assert len(pairs) == len(AXES[first]) * len(AXES[second])


def trained_accept_lengths(bed: Bed, name: str) -> list[float]:
    """Mean accept length of an embedded drafter with one request at a time and with four; ids are plain decoding's."""
    drafter = {"speculative_draft_model_path": name, "speculative_draft_load_format": "auto"}
    drafter["speculative_dspark_block_size"] = None
    means = []
    for batch in (1, 4):
        ids, accepted = bed.run(Setup("DSPARK"), Play("own", batch), **drafter)
        assert ids == bed.truth("cuda")
        means.append(sum(length * count for length, count in accepted.items()) / accepted.total())
    return means


@pytest.mark.parametrize("name", EMBEDDED_DRAFTERS)
def test_the_trained_drafter_is_accepted_alone_and_in_a_batch(beds, name):
    """A drafter that reads the wrong rows or slots stays lossless, and loses its accept length."""
    means = trained_accept_lengths(beds("pico")[0], name)
    assert min(means) > TRAINED_FLOOR and abs(means[0] - means[1]) < 0.1 * means[0], means
