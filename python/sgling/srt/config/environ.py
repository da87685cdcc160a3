"""Environment variables: the only reader of ``os.environ``. Unknown variables are ignored.

Values are read when asked for, so a test or a launcher may set them at any time before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import get_type_hints

from sgling.srt.config.flags import ServerArgsError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Environ:
    """Switches that users of upstream set; field ``x`` is read from ``SGLANG_X``.

    Attributes:
        ragged_verify_mode: DSPARK verify above batch 1: static = all drafts; compact = those most likely to survive,
            packed; cap-accept = the same ones count, all rows run (to compare with compact).
        opt_fused_kda_verify: asked for in published launch lines; the fused verify is the only one here.
        enable_metadata_glue_graph: ``--cuda-graph-metadata glue`` where that flag is not given.
        enable_fused_verify_extend_graph: asked for in published launch lines; a step is one graph here anyway.
        health_check_timeout: seconds a health probe waits for any engine output.
        enable_health_endpoint_generation: whether ``/health`` runs a one-token request.
        req_waiting_timeout: seconds a request may wait in the queue, -1 = any.
        req_running_timeout: seconds a request may run, -1 = any.
        simulate_acc_len: benchmarks only: mean accept length that is forced upon every verify, -1 = the true one.
    """

    ragged_verify_mode: str = "static"
    opt_fused_kda_verify: bool = False
    enable_metadata_glue_graph: bool = False
    enable_fused_verify_extend_graph: bool = False
    health_check_timeout: float = 20.0
    enable_health_endpoint_generation: bool = True
    req_waiting_timeout: float = -1.0
    req_running_timeout: float = -1.0
    simulate_acc_len: float = -1.0


def read_environ(variables: Mapping[str, str] | None = None) -> Environ:
    """Read all switches. Raises ServerArgsError naming a variable whose value cannot be read."""
    source = os.environ if variables is None else variables
    types = get_type_hints(Environ)
    given = {}
    for field in fields(Environ):
        name = f"SGLANG_{field.name.upper()}"
        if name in source:
            given[field.name] = _read(name, source[name], types[field.name])
    return Environ(**given)


def _read(name: str, text: str, kind: type):
    if kind is bool:
        lowered = text.strip().lower()
        if lowered not in _TRUE + _FALSE:
            raise ServerArgsError(f"environment variable {name}={text!r} is not a switch (0 or 1)")
        return lowered in _TRUE
    try:
        return kind(text)
    except ValueError:
        raise ServerArgsError(f"environment variable {name}={text!r} is not a {kind.__name__}") from None


def force_shutdown(variables: Mapping[str, str] | None = None) -> bool:
    """``SGL_FORCE_SHUTDOWN``: exit at once on SIGTERM instead of draining."""
    source = os.environ if variables is None else variables
    return _read("SGL_FORCE_SHUTDOWN", source.get("SGL_FORCE_SHUTDOWN", "0"), bool)


def kernel_switches(variables: Mapping[str, str] | None = None) -> dict[str, bool]:
    """``SGLING_DISABLE_CUDA_KERNELS`` and ``SGLING_DISABLE_PDL`` as arguments of ``dispatch.set_kernel_switches``."""
    source = os.environ if variables is None else variables
    names = {"cuda_kernels": "SGLING_DISABLE_CUDA_KERNELS", "pdl": "SGLING_DISABLE_PDL"}
    return {switch: not _read(name, source.get(name, "0"), bool) for switch, name in names.items()}


def bench_authorization(variables: Mapping[str, str] | None = None) -> str | None:
    """Authorization header of the bench client: ``OPENAI_API_KEY`` as a bearer token, else ``API_KEY`` as it is."""
    source = os.environ if variables is None else variables
    if source.get("OPENAI_API_KEY"):
        return f"Bearer {source['OPENAI_API_KEY']}"
    return source.get("API_KEY") or None


def openmp_threads(variables: Mapping[str, str] | None = None) -> int | None:
    """``OMP_NUM_THREADS``, which torch has obeyed already; None when unset or not a plain number."""
    text = (os.environ if variables is None else variables).get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() else None


def no_color(variables: Mapping[str, str] | None = None) -> bool:
    """``NO_COLOR``: any non-empty value asks programs not to colour their output."""
    source = os.environ if variables is None else variables
    return bool(source.get("NO_COLOR"))


def with_visible_gpu(index: int) -> dict[str, str]:
    """Environment for a child process that shall see one GPU only: the ``index``-th of those visible here."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    chosen = visible[index] if index < len(visible) else str(index)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": chosen}
