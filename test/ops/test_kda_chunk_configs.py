"""fla-core's chunk kernels: each keeps one configuration of its own list, so that nothing is tuned at run time."""

from __future__ import annotations

import pytest

pytest.importorskip("fla")
from sgling_kernel import dispatch  # noqa: E402 (behind the skip)
from sgling_kernel.kda import chunk_configs  # noqa: E402


@pytest.fixture
def tuners():
    """The library's tuners by kernel name, with the lists they came with."""
    found = {name: chunk_configs.autotuner(name) for name in chunk_configs.CONFIGS}
    before = {name: tuner.configs for name, tuner in found.items()}
    yield found
    for name, tuner in found.items():
        tuner.configs = before[name]


def test_every_kernel_keeps_one_of_its_own_configurations(tuners):
    offered = {name: [config.all_kwargs() for config in tuner.configs] for name, tuner in tuners.items()}
    assert chunk_configs.fix_configs.__wrapped__()
    for name, tuner in tuners.items():
        (kept,) = tuner.configs
        assert kept.all_kwargs() in offered[name], name


def test_a_library_with_other_kernels_is_said_and_tunes_itself(tuners, monkeypatch):
    refused: dict[str, str] = {}
    monkeypatch.setattr(dispatch, "_refused", refused)
    gone = {"no_such_kernel": next(iter(chunk_configs.CONFIGS.values()))}
    monkeypatch.setattr(chunk_configs, "CONFIGS", {**chunk_configs.CONFIGS, **gone})
    before = {name: tuner.configs for name, tuner in tuners.items()}
    assert not chunk_configs.fix_configs.__wrapped__()
    assert {name: tuner.configs for name, tuner in tuners.items()} == before
    (reason,) = refused.values()
    assert "no_such_kernel" in reason
