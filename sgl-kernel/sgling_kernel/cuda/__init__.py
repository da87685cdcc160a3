"""CUDA C++ kernels: which library serves and how one is called.

Every operator with a CUDA form has a ``.cu`` source beside its reference and a thin ``cuda.py`` that calls it through
:func:`launch`. Tests run the same sources on CPU tensors with :func:`emulation`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.cuda.build import PACKAGE, BuildError, Target, build, build_all, compiler

__all__ = ["BuildError", "emulation", "function", "launch", "prebuild", "why_not"]

_emulated = False
_C_TYPES = {"long long": ctypes.c_longlong, "int": ctypes.c_int, "float": ctypes.c_float}


@contextmanager
def emulation() -> Iterator[None]:
    """Inside the block CUDA C++ kernels are compiled by g++ and run on CPU tensors, one thread after another."""
    global _emulated
    previous, _emulated = _emulated, True
    try:
        yield
    finally:
        _emulated = previous


@cache
def device_capability() -> tuple[int, int]:
    """Compute capability of the current GPU."""
    return torch.cuda.get_device_capability()


def why_not() -> str | None:
    """Reason why no CUDA C++ kernel can serve in this process, or None. Cheap: asked on every call of an operator."""
    if not dispatch.cuda_kernels_enabled():
        return "CUDA C++ kernels are switched off (SGLING_DISABLE_CUDA_KERNELS)"
    return _missing(_emulated)


@cache
def _missing(emulated: bool) -> str | None:
    if compiler(emulated) is None:
        return "g++ is not installed" if emulated else "nvcc is not installed"
    if emulated:
        return None
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = device_capability()
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, 8.0 is needed"


def has_bulk_copies() -> bool:
    """Whether kernels may include ``bulk.cuh``: compute capability 9.0 and up, and the emulation."""
    return _emulated or device_capability() >= (9, 0)


def _starts_early() -> bool:
    """Whether kernels are launched programmatically dependent, which a GPU before 9.0 cannot do."""
    return dispatch.pdl_enabled() and (_emulated or device_capability() >= (9, 0))


def has_clusters() -> bool:
    """Whether kernels may run as clusters of more than one CTA (``cluster.cuh``): compute capability 9.0 and up."""
    return not _emulated and device_capability() >= (9, 0)


def _target(emulated: bool) -> Target:
    return Target(None if emulated else device_capability())


def prebuild() -> None:
    """Compile every source of the package at once, so that no operator waits for the compiler at its first call."""
    build_all(_target(_emulated))


def function(source: str | Path, name: str) -> ctypes._CFuncPtr:
    """The C function ``name`` of a source (path within the package, or absolute), compiled at the first call.

    Its parameter types are read from the source: pointers, ``long long``, ``int`` and ``float``, then ``int pdl, void*
    stream``. Raises BuildError (compiler output) or TypeError (another parameter type).
    """
    return _function(str(source), name, _emulated)


@cache
def _function(source: str, name: str, emulated: bool) -> ctypes._CFuncPtr:
    path = PACKAGE / source
    library = _library(path, emulated)
    found = getattr(library, name)
    found.argtypes, found.restype = _signature(path.read_text(encoding="utf-8"), name), ctypes.c_int
    found.error_text = library.sgling_error
    return found


@cache
def _library(path: Path, emulated: bool) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(path, _target(emulated))))
    library.sgling_error.argtypes, library.sgling_error.restype = [ctypes.c_int], ctypes.c_char_p
    return library


def _signature(text: str, name: str) -> list[type]:
    """ctypes parameter types of an ``extern "C" int name(...)`` definition."""
    found = re.search(rf'extern\s+"C"\s+int\s+{name}\s*\(([^)]*)\)', text)
    if found is None:
        raise TypeError(f'no extern "C" int {name}(...) in the source')
    kinds = []
    for parameter in found[1].split(","):
        kind = re.sub(r"\s*\w+\s*$", "", parameter.strip())
        if "*" in parameter:
            kinds.append(ctypes.c_void_p)
        elif kind in _C_TYPES:
            kinds.append(_C_TYPES[kind])
        else:
            raise TypeError(f"{name}: parameter '{parameter.strip()}' is none of pointer, long long, int, float")
    return kinds


def launch(called: ctypes._CFuncPtr, *arguments: Tensor | int | float | None) -> None:
    """Call a kernel's C function on the current stream; tensors go as addresses, None as a null pointer.

    ``pdl`` and ``stream`` are appended. Raises RuntimeError with CUDA's text, TypeError for a wrong argument count.
    """
    if len(arguments) + 2 != len(called.argtypes):
        raise TypeError(f"{called.__name__} takes {len(called.argtypes) - 2} arguments, got {len(arguments)}")
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    stream = None if _emulated else torch.cuda.current_stream().cuda_stream
    code = called(*values, int(_starts_early()), stream)
    if code != 0:
        raise RuntimeError(f"{called.__name__}: {called.error_text(code).decode()}")
