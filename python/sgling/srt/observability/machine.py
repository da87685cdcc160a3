"""What this machine is: processors, memory, GPUs, and the versions that matter."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "fla-core", "flashinfer-python")


def _first_field(path: str, name: str) -> str | None:
    """Value of the first ``name : value`` line of a /proc file; None where there is none."""
    try:
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    except OSError:
        return None
    return None


def cpu_facts() -> list[tuple[str, str]]:
    """(name, value) of the host."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _first_field("/proc/meminfo", "MemTotal")
    free = _first_field("/proc/meminfo", "MemAvailable")
    facts = [
        ("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"),
        ("processor", _first_field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()),
        ("cores", f"{cores} usable, {torch.get_num_threads()} threads of torch"),
    ]
    if memory and free:
        facts.append(("memory", f"{_gigabytes(memory):.1f} GB, {_gigabytes(free):.1f} GB available"))
    return facts


def _gigabytes(kilobytes: str) -> float:
    return int(kilobytes.split()[0]) * 1024 / 1e9


def gpu_facts() -> list[tuple[str, str]]:
    """(name, value) of every visible GPU; one line saying so where there is none."""
    import torch

    if not torch.cuda.is_available():
        return [("gpu", "none visible")]
    facts = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        facts.append(
            (
                f"gpu {index}",
                f"{found.name}, {found.total_memory / 1e9:.0f} GB, compute capability {found.major}.{found.minor}, "
                f"{found.multi_processor_count} SMs",
            )
        )
    return facts


def package_facts() -> list[tuple[str, str]]:
    """(name, version) of the libraries the engine stands on."""
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, "not installed"))
    return found
