"""Shared test setup: one thread (bits must not depend on the core count), fixed seeds, GPU tests skipped."""

from __future__ import annotations

import os
import random
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on CPU tensors

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from sgling_kernel import cuda, dispatch
from sgling_kernel.linear import set_fixed_rows

torch.set_num_threads(1)
GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items):
    """Skip test/gpu where no GPU is visible."""
    if torch.cuda.is_available():
        return
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _fixed_seeds():
    """Every test starts from the same random state, in any order."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _default_linears():
    """``--enable-deterministic-inference`` is a setting of the process: no test leaves it to the next."""
    yield
    set_fixed_rows(None)


_interpreted_dot = interpreter.InterpreterBuilder.create_dot


def _dot(builder, a, b, *rest):
    """tl.dot of the interpreter, which keeps bf16 as 16-bit integers and would multiply those."""
    return _interpreted_dot(builder, _widened(a), _widened(b), *rest)


def _widened(operand):
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture
def emulated_cuda(monkeypatch):
    """Operators take their CUDA C++ form on CPU tensors: g++ compiles the kernels, fibers run their threads.

    What a CUDA form refuses falls through to the Triton form, which runs in Triton's interpreter. Skips without g++.
    """
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
    with cuda.emulation():
        reason = cuda.why_not()
        if reason is not None:
            pytest.skip(reason)
        yield
