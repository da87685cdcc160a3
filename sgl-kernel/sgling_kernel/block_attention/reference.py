"""Paged attention of draft blocks, plain torch (docs/dspark.md §1.3): grouped queries, whole block or causal, window.

Latent attention is the case of one key head whose value is the leading part of its key.
"""

import torch
from torch import Tensor

from sgling_kernel.mla.context import PagedContext


def block_attention(
    q: Tensor, keys: Tensor, values: Tensor, ctx: PagedContext, causal: bool, window: int | None, scale: float
) -> Tensor:
    """Attention of bs * width block rows over each request's context and the block's own, already written entries.

    Args:
        q: [N, H, D]; query head h reads key head h // (H / KVH).
        keys, values: [slots, KVH, D] and [slots, KVH, V], views of one layer's cache.
        ctx: row j of a request lies at position seq_len + j.
        causal: row j sees positions <= seq_len + j; else every row sees the whole block.
        window: a row at position p sees positions > p - window only; None = all.

    Returns:
        [N, H, V] in q.dtype; scores, softmax and sum in fp32, one rounding. Entries nobody sees have no influence, not
        even as NaN. Rows are not bit-invariant: drafters need none.
    """
    bs, width, (kv_heads, v_dim) = ctx.seq_lens.shape[0], ctx.width, values.shape[1:]
    slots = ctx.slots()
    position = torch.arange(slots.shape[1], device=q.device)
    own = ctx.last_visible()
    last = own if causal else own[:, -1:].expand(-1, width)
    visible = position <= last[..., None]
    if window is not None:
        visible = visible & (position > own[..., None] - window)
    query = q.float().view(bs, width, kv_heads, -1, q.shape[-1])
    scores = torch.einsum("bwkgd,blkd->bkwgl", query, keys[slots].float()) * scale
    probs = torch.where(visible[:, None, :, None], scores, -torch.inf).softmax(-1)
    value = torch.where(visible.any(1)[..., None, None], values[slots].float(), 0.0)
    return torch.einsum("bkwgl,blkd->bwkgd", probs, value).reshape(bs * width, -1, v_dim).to(q.dtype)
