"""Thread rule of a CPU: one thread to decode, all cores for a long prefill chunk, OMP_NUM_THREADS before both."""

from __future__ import annotations

import pytest
import torch

from sgling.srt.config.environ import openmp_threads
from sgling.srt.config.server_args import ServerArgs
from sgling.srt.model_executor import cpu_threads
from sgling.srt.model_executor.cpu_threads import LONG_CHUNK, CpuThreads


@pytest.fixture
def asked(monkeypatch):
    """Thread counts given to torch, on a machine of eight cores without OMP_NUM_THREADS."""
    calls = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(cpu_threads, "_usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return calls


def rule(**kwargs) -> CpuThreads:
    return CpuThreads(ServerArgs.from_kwargs(model_path="m", device="cpu", **kwargs))


def test_only_long_chunks_wake_other_cores(asked):
    threads = rule()
    for rows in (1, 8, LONG_CHUNK - 1, LONG_CHUNK, 2048, 1):
        threads.for_rows(rows)
    assert asked == [1, 1, 1, 8, 8, 1]


def test_ranks_share_the_cores_and_deterministic_mode_keeps_to_one(asked):
    rule(tp_size=4).for_rows(2048)
    rule(tp_size=64).for_rows(2048)
    rule(enable_deterministic_inference=True).for_rows(2048)
    assert asked == [2, 1, 1]


def test_omp_num_threads_wins(asked, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    rule().for_rows(2048)
    assert asked == []


@pytest.mark.parametrize(("text", "count"), [("4", 4), ("", None), ("4,2", None)])
def test_omp_num_threads_is_a_plain_number(text, count):
    assert openmp_threads({"OMP_NUM_THREADS": text}) == count


def test_no_variable_means_no_limit():
    assert openmp_threads({}) is None
