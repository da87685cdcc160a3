"""Environment switches: names, defaults, errors, and that unknown variables are ignored."""

from __future__ import annotations

import pytest

from sgling.srt.config.environ import (
    Environ,
    bench_authorization,
    force_shutdown,
    kernel_switches,
    no_color,
    read_environ,
)
from sgling.srt.config.flags import ServerArgsError
from sgling.srt.config.server_args import ServerArgs


def test_defaults():
    environ = read_environ({})
    assert environ == Environ()
    assert environ.ragged_verify_mode == "static"
    assert environ.health_check_timeout == 20
    assert environ.enable_health_endpoint_generation
    assert (environ.req_waiting_timeout, environ.req_running_timeout) == (-1, -1)


def test_published_variables_are_read_and_unknown_ones_ignored():
    environ = read_environ(
        {
            "SGLANG_RAGGED_VERIFY_MODE": "compact",
            "SGLANG_OPT_FUSED_KDA_VERIFY": "1",
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH": "1",
            "SGLANG_ENABLE_FUSED_VERIFY_EXTEND_GRAPH": "true",
            "SGLANG_HEALTH_CHECK_TIMEOUT": "3",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "False",
            "SGLANG_SOMETHING_ELSE": "x",
        }
    )
    assert environ == Environ(
        ragged_verify_mode="compact",
        opt_fused_kda_verify=True,
        enable_metadata_glue_graph=True,
        enable_fused_verify_extend_graph=True,
        health_check_timeout=3.0,
        enable_health_endpoint_generation=False,
    )


@pytest.mark.parametrize("name", ["SGLANG_HEALTH_CHECK_TIMEOUT", "SGLANG_ENABLE_METADATA_GLUE_GRAPH"])
def test_unreadable_values_are_start_up_errors_that_name_the_variable(monkeypatch, name):
    with pytest.raises(ServerArgsError, match=name):
        read_environ({name: "soon"})
    monkeypatch.setenv(name, "soon")
    with pytest.raises(ServerArgsError, match=name):
        ServerArgs.from_cli([])


def test_process_environment_is_read_when_asked(monkeypatch):
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "5")
    monkeypatch.setenv("SGL_FORCE_SHUTDOWN", "1")
    assert read_environ().req_waiting_timeout == 5
    assert force_shutdown()
    assert not force_shutdown({})


def test_bench_authorization():
    assert bench_authorization({}) is None
    assert bench_authorization({"API_KEY": "raw"}) == "raw"
    assert bench_authorization({"API_KEY": "raw", "OPENAI_API_KEY": "k"}) == "Bearer k"


def test_no_color():
    assert no_color({"NO_COLOR": "1"})
    assert not no_color({"NO_COLOR": ""})


def test_kernel_switches():
    assert kernel_switches({}) == {"cuda_kernels": True, "pdl": True}
    assert kernel_switches({"SGLING_DISABLE_PDL": "1"}) == {"cuda_kernels": True, "pdl": False}
    with pytest.raises(ValueError, match="SGLING_DISABLE_CUDA_KERNELS"):
        kernel_switches({"SGLING_DISABLE_CUDA_KERNELS": "perhaps"})
