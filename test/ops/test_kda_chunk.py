"""fla-core's chunk kernels called directly against its wrappers and the recurrence; in the interpreter or on a GPU."""

from __future__ import annotations

import builtins

import pytest
import torch

pytest.importorskip("fla")
import fla.ops.common.chunk_delta_h as states_module  # noqa: E402 (behind the skip)
import fla.ops.kda.chunk_intra as intra_module  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from conftest import _dot  # noqa: E402
from ops.kda_case import make_params, make_pools, make_rows  # noqa: E402
from ops.test_triton_kernels import DEVICE, GPU, close  # noqa: E402
from sgling_kernel import dispatch  # noqa: E402
from sgling_kernel.kda import chunk, gpu, reference  # noqa: E402

SLOT = 1


def _range(count):
    """``range`` of a kernel under the interpreter, whose own yields integers without the methods of tensors."""
    stop = int(count.handle.data.item()) if hasattr(count, "handle") else count
    return map(interpreter._implicit_cvt, builtins.range(stop))


@pytest.fixture(autouse=True)
def _kernels_run_here(monkeypatch):
    """Without a GPU: what these kernels ask of the interpreter and it lacks."""
    torch.set_default_device(DEVICE)
    if not GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        monkeypatch.setattr(states_module, "range", _range, raising=False)
        monkeypatch.setattr(intra_module, "IS_GATHER_SUPPORTED", False)
        monkeypatch.setattr(chunk, "GATHER", False)
    yield
    torch.set_default_device("cpu")


def case(dtype, tokens, heads=2, dim=64):
    """(params, rows, pools, slot) of one layer."""
    return make_params(heads, dim), make_rows(tokens, heads, dim, dtype), make_pools(1, 3, heads, dim, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16] if GPU else [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 100])
def test_direct_calls_give_what_the_library_gives(dtype, tokens):
    p, rows, pools = case(dtype, tokens)
    assert chunk.why_not() is None
    slots, state = torch.tensor([SLOT]), pools.state[0, SLOT : SLOT + 1].clone()
    direct = chunk.chunk_form(gpu.chunk_inputs(*rows, p, pools.conv[0], slots, summed=True), state)
    inputs = gpu.chunk_inputs(*rows, p, pools.conv[0], slots, summed=False)
    for got, want in zip(direct, gpu._library_form(inputs, state, p.lower_bound), strict=True):
        if GPU:  # the sum of log decays is cut into other warps there
            close(got, want, dtype)
        else:
            assert torch.equal(got, want)


@pytest.mark.skipif(GPU, reason="fp32 products are TF32 there; test/gpu/test_prefill.py compares bf16")
def test_two_chunks_of_a_prompt_are_the_recurrence():
    p, rows, pools = case(torch.float32, 90)
    stepped, slots = pools.clone(), torch.tensor([SLOT])
    parts = [gpu.kda_extend(*rows.pick(part), p, *pools.layer(0), slots) for part in (slice(0, 70), slice(70, 90))]
    close(torch.cat(parts), reference.kda_extend(*rows, p, *stepped.layer(0), slots), torch.float32)
    close(pools.state, stepped.state, torch.float32)
    assert torch.equal(pools.conv, stepped.conv)


def test_a_library_with_other_arguments_is_said(monkeypatch):
    monkeypatch.setattr(dispatch, "_refused", {})
    monkeypatch.setattr(chunk, "_ARGUMENTS", {**chunk._ARGUMENTS, chunk._OUTPUT: "q v g"})
    reason = chunk.why_not.__wrapped__()
    assert reason is not None and chunk._OUTPUT in reason
