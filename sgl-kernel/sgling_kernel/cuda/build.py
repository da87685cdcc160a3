"""Compiles a CUDA source into a shared library: nvcc for a GPU, g++ for the CPU emulation of the tests.

A library is one source with the headers of ``cuda/include``. It is cached under a key of everything it is made from, so
a changed source, header, compiler or architecture makes another file and old ones are never wrong.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1]
INCLUDE = Path(__file__).resolve().parent / "include"
_NVCC_PLACES = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")
_LOCAL_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


class Target(NamedTuple):
    """What to compile for: compute capability ``(major, minor)``, or None for the emulation."""

    capability: tuple[int, int] | None

    @property
    def name(self) -> str:
        return "emulated" if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"


class BuildError(RuntimeError):
    """A compiler refused a source; the message carries its output."""


@cache
def compiler(emulated: bool) -> str | None:
    """Path of the compiler a target needs, or None: nvcc on the PATH or where CUDA installs it; g++ on the PATH."""
    if emulated:
        return shutil.which("g++")
    return shutil.which("nvcc") or next((place for place in _NVCC_PLACES if Path(place).is_file()), None)


@cache
def _compiler_version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout


def _flags(target: Target) -> list[str]:
    if target.capability is None:
        return ["-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-DSGLING_EMULATE",
                "-Wno-unknown-pragmas"]  # fmt: skip
    arch = target.name.removeprefix("sm_")
    return ["-shared", "-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-lineinfo", "--expt-relaxed-constexpr",
            "-gencode", f"arch=compute_{arch},code=sm_{arch}"]  # fmt: skip


def _inputs(source: Path) -> list[Path]:
    """The source and every header it includes by a quoted name, beside it or in ``cuda/include``."""
    found, waiting = [], [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        for name in _LOCAL_INCLUDE.findall(path.read_text(encoding="utf-8")):
            places = [place / name for place in (path.parent, INCLUDE)]
            waiting += [place.resolve() for place in places if place.is_file()][:1]
    return found


def library_path(source: Path, target: Target) -> Path:
    """Where the library of a source lies once it is built. Raises BuildError without a compiler."""
    path = compiler(target.capability is None)
    if path is None:
        raise BuildError(f"{source.name}: no {'g++' if target.capability is None else 'nvcc'} on this machine")
    key = hashlib.sha256()
    for part in (_compiler_version(path), *_flags(target)):
        key.update(part.encode())
    for file in _inputs(source):
        key.update(file.read_bytes())
    return _cache_directory() / target.name / f"{source.parent.name}-{source.stem}-{key.hexdigest()[:20]}.so"


@cache
def _cache_directory() -> Path:
    """``~/.cache/sgling``; a directory of this user under the temporary one where home is not writable."""
    for place in (Path.home() / ".cache", Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"):
        try:
            (place / "sgling").mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(place / "sgling", os.W_OK):
            return place / "sgling"
    raise BuildError("no writable place for compiled kernels: neither ~/.cache nor the temporary directory")


@contextmanager
def _alone(path: Path):
    """One process builds a library; the others wait for it and find it done."""
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(source: Path, target: Target) -> Path:
    """The library of a source, compiled unless the cache has it. Raises BuildError with the compiler's output."""
    path = library_path(source, target)
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        if not path.is_file():
            _compile(source, target, path)
    return path


def _compile(source: Path, target: Target, path: Path) -> None:
    """Compile into a file of another name and move it into place whole."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler(target.capability is None), *_flags(target), "-I", str(INCLUDE), "-o", str(unfinished)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        raise BuildError(f"{source} does not compile for {target.name}:\n{done.stdout}{done.stderr}")
    os.replace(unfinished, path)


def sources() -> list[Path]:
    """Every CUDA source of the package."""
    return sorted(PACKAGE.rglob("*.cu"))


def build_all(target: Target, files: Iterable[Path] | None = None) -> list[Path]:
    """Build many sources at once, one compiler per core; the first error is raised after all have ended."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(build, file, target) for file in (sources() if files is None else files)]
    return [job.result() for job in jobs]
