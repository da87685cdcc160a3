"""KDA prefill on a GPU: fla-core's chunk kernel between our convolution and our state layout (extra ``gpu``)."""

import importlib.util
import logging
from functools import cache

import torch
from torch import Tensor

from sgling_kernel.kda.chunk_configs import fix_configs
from sgling_kernel.kda.params import KDAParams
from sgling_kernel.kda.prefill_kernel import convolve, log_decay
from sgling_kernel.pointwise import sigmoid

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


def kda_prefill(
    qkv: Tensor, f: Tensor, b: Tensor, p: KDAParams, conv_window: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """reference.kda_prefill through ``fla.ops.kda.chunk_kda``; agrees to bf16 rounding."""
    from fla.ops.kda import chunk_kda

    fix_configs()
    heads, dim = p.dt_bias.shape
    q, k, v = convolve(qkv, conv_window, p.conv_weight).view(1, -1, 3, heads, dim).unbind(2)
    out, new_state = chunk_kda(
        q=q.contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        g=log_decay(f, p)[None],
        beta=sigmoid(b.float())[None],
        initial_state=state[None].contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        safe_gate=True,
        lower_bound=p.lower_bound,
        state_v_first=True,
    )
    rows = qkv[-3:] if qkv.shape[0] >= 3 else torch.cat((conv_window, qkv))[-3:]
    return out[0], rows.clone(), new_state[0]
