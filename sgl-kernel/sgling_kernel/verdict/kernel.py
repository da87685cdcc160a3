"""The accepted prefix of a chain in one Triton node (see reference.chain_accept)."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["stride_c", "stride_t", "W"])
def _accept_kernel(candidates, target_ids, accept_lens, bonus, stride_c, stride_t, W, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    inside = j < W - 1
    draft = tl.load(candidates + request * stride_c + j + 1, mask=inside, other=0)
    target = tl.load(target_ids + request * stride_t + j, mask=inside, other=0)
    correct = tl.min(tl.where(inside & (draft == target), W - 1, tl.minimum(j, W - 1)), 0)
    tl.store(accept_lens + request, (correct + 1).to(tl.int64))
    tl.store(bonus + request, tl.load(target_ids + request * stride_t + correct))


def chain_accept(candidates: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """reference.chain_accept; rows may be strided."""
    bs, width = candidates.shape
    out = torch.empty(2, bs, dtype=torch.int64, device=candidates.device)
    _accept_kernel[(bs,)](
        candidates, target_ids, out[0], out[1], candidates.stride(0), target_ids.stride(0), width,
        BLOCK=max(16, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip
    return out[0], out[1]
