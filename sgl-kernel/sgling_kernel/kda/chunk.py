"""The chunk form as fla-core's kernels one after another, without the library's wrappers.

The wrappers cost the host more than the launches do (inspection of arguments, keys of tuners that have one
configuration), clear two outputs that are written whole, and sum the log decay in a node of its own.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.kda.chunk_configs import CONFIGS, autotuner
from sgling_kernel.kda.prefill_kernel import CHUNK, RCP_LN2, ChunkInputs

SUB_CHUNK = 16
GATE_SHIFT = 2.0 * RCP_LN2  # the library's default; see its chunk_kda_fwd_intra
WY_BLOCK = 64
GATHER = hasattr(tl, "gather")

_INTRA = "chunk_kda_fwd_kernel_intra_sub_chunk"
_SOLVE = "chunk_kda_fwd_kernel_inter_solve_fused"
_WY = "recompute_w_u_fwd_kda_kernel"
_STATES = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
_OUTPUT = "chunk_gla_fwd_kernel_o"
_SEQUENCES = "cu_seqlens chunk_indices"
_ARGUMENTS = {  # of the version these calls were written for, apart from a last USE_GRAPH, which stays False
    _INTRA: f"q k g beta Aqk Akk scale {_SEQUENCES} T H HV K BT BC BK IS_VARLEN GATE_SHIFT USE_GATHER",
    _SOLVE: f"q k g beta Aqk Akkd Akk scale {_SEQUENCES} T H HV K BT BC NC BK IS_VARLEN USE_SAFE_GATE",
    _WY: f"q k qg kg v beta w u A gk {_SEQUENCES} T H HV K V BT BK BV STORE_QG STORE_KG IS_VARLEN",
    _STATES: "k v w v_new g gk h h0 ht cu_seqlens chunk_offsets T H HV K V BT BV USE_G USE_GK USE_INITIAL_STATE "
    "STORE_FINAL_STATE SAVE_NEW_VALUE STATE_V_FIRST IS_VARLEN",
    _OUTPUT: f"q v g h o A {_SEQUENCES} scale T H HV K V BT BK BV STATE_V_FIRST IS_VARLEN",
}


@cache
def _kernel(name: str):
    """The library's kernel without its tuner and heuristics."""
    return autotuner(name).fn


@cache
def why_not() -> str | None:
    """Reason why the library's kernels cannot be called directly, or None: they must take the known arguments."""
    for name, arguments in _ARGUMENTS.items():
        try:
            found = [argument for argument in _kernel(name).arg_names if argument != "USE_GRAPH"]
        except (AttributeError, ImportError) as error:
            return f"this fla-core has other kernels ({error})"
        if found != arguments.split():
            return f"{name} of this fla-core takes {found}"
    return None


def _launch(name: str, grid: tuple[int, ...], **arguments) -> None:
    """Launch a kernel with its fixed blocks, warps and stages."""
    config = CONFIGS[name]
    _kernel(name)[grid](**arguments, **config.blocks, num_warps=config.num_warps, num_stages=config.num_stages)


def chunk_form(inputs: ChunkInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output and last state of one request whose ``inputs.g`` is summed within chunks.

    state fp32 [1, H, V, K] -> (o [1, T, H, V] in the model dtype, state fp32 [1, H, V, K]); K = V.
    """
    (q, k, v, g, beta), (_, tokens, heads, dim) = inputs, inputs.q.shape
    chunks, scale = triton.cdiv(tokens, CHUNK), dim**-0.5
    common = {"cu_seqlens": None, "T": tokens, "H": heads, "HV": heads, "K": dim, "BT": CHUNK, "IS_VARLEN": False}
    flat = common | {"chunk_indices": None}
    scores, solved = q.new_empty(1, tokens, heads, CHUNK), q.new_zeros(1, tokens, heads, CHUNK)  # solved: lower half
    diagonal = g.new_empty(1, tokens, heads, SUB_CHUNK)
    pair = {"q": q, "k": k, "g": g, "beta": beta, "Aqk": scores, "scale": scale, "BC": SUB_CHUNK}
    _launch(
        _INTRA, (chunks, CHUNK // SUB_CHUNK, heads), **pair, **flat, Akk=diagonal,
        BK=triton.next_power_of_2(dim), GATE_SHIFT=GATE_SHIFT, USE_GATHER=GATHER,
    )  # fmt: skip
    _launch(
        _SOLVE, (chunks, heads), **pair, **flat, Akkd=diagonal, Akk=solved, NC=CHUNK // SUB_CHUNK, USE_SAFE_GATE=True
    )
    w, u, keys, values, out = torch.empty((5, *q.shape), dtype=q.dtype, device=q.device).unbind()
    _launch(
        _WY, (chunks, heads), **flat, q=None, k=k, qg=None, kg=keys, v=v, beta=beta, w=w, u=u, A=solved, gk=g,
        V=dim, BK=WY_BLOCK, BV=WY_BLOCK, STORE_QG=False, STORE_KG=True,
    )  # fmt: skip
    states, last = q.new_empty(1, chunks, heads, dim, dim), torch.empty_like(state)
    _launch(
        _STATES, (triton.cdiv(dim, CONFIGS[_STATES].blocks["BV"]) * heads,), **common, chunk_offsets=None,
        k=keys, v=u, w=w, v_new=values, g=None, gk=g, h=states, h0=state, ht=last, V=dim, USE_G=False, USE_GK=True,
        USE_INITIAL_STATE=True, STORE_FINAL_STATE=True, SAVE_NEW_VALUE=True, STATE_V_FIRST=True,
    )  # fmt: skip
    _launch(
        _OUTPUT, (triton.cdiv(dim, CONFIGS[_OUTPUT].blocks["BV"]) * chunks, heads), **flat,
        q=q, v=values, g=g, h=states, o=out, A=scores, scale=scale, V=dim, STATE_V_FIRST=True,
    )  # fmt: skip
    return out, last
