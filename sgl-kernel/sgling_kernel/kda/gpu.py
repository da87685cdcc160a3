"""KDA prefill on a GPU: fla-core's chunk kernel between our convolution and our state layout (extra ``gpu``)."""

import importlib.util
import logging
from functools import cache

import torch
from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.kda import chunk
from sgling_kernel.kda.chunk_configs import fix_configs
from sgling_kernel.kda.params import KDAParams
from sgling_kernel.kda.prefill_kernel import ChunkInputs, chunk_inputs, hand_over

logger = logging.getLogger(__name__)


@cache
def _missing_library() -> str | None:
    """Why fla-core cannot be used here; logged once."""
    if importlib.util.find_spec("fla") is not None and importlib.util.find_spec("einops") is not None:
        return None
    reason = "fla-core is not installed (extra `gpu`): KDA prefill runs as plain torch"
    logger.warning("%s", reason)
    return reason


def why_not_chunk_kda(qkv: Tensor, p: KDAParams) -> str | None:
    """Reason why the chunk kernel cannot serve these operands, or None."""
    if not qkv.is_cuda or qkv.dtype != torch.bfloat16:
        return f"the chunk kernel takes bf16 on a GPU, not {qkv.dtype} on {qkv.device.type}"
    if p.lower_bound < -5.0:
        return f"the chunk kernel takes gates bounded by -5, not {p.lower_bound}"
    return _missing_library()


def kda_extend(
    qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, conv_pool: Tensor, state_pool: Tensor, state_slots: Tensor
) -> Tensor:
    """reference.kda_extend in fla-core's chunk form; agrees to bf16 rounding.

    q and k are normalised where they are convolved, with the library's two roundings.
    """
    direct = dispatch.usable("kda.chunk.kernels", chunk.why_not())
    inputs = chunk_inputs(qkv, f, b, p, conv_pool, state_slots, summed=direct)
    state = state_pool.index_select(0, state_slots)
    out, state = chunk.chunk_form(inputs, state) if direct else _library_form(inputs, state, p.lower_bound)
    hand_over(qkv, state, conv_pool, state_pool, state_slots)
    return out[0]


def _library_form(inputs: ChunkInputs, state: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """chunk.chunk_form through ``fla.ops.kda.chunk_kda``, for inputs whose g is not summed."""
    from fla.ops.kda import chunk_kda

    fix_configs()
    return chunk_kda(
        **inputs._asdict(),
        initial_state=state,
        output_final_state=True,
        safe_gate=True,
        lower_bound=lower_bound,
        state_v_first=True,
    )
