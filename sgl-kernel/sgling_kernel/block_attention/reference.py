"""Paged attention of draft blocks, plain torch (docs/dspark.md §1.3): grouped queries, whole block or causal, window.

Latent attention is the case of one key head whose value is the leading part of its key.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sgling_kernel.mla.context import PagedContext
from sgling_kernel.norm.reference import rms_norm
from sgling_kernel.rotary import apply_rope, apply_rope_neox


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


class RowRotary(NamedTuple):
    """Where rows stand and how their heads turn.

    Attributes:
        positions: int64 [N].
        table: fp32 [P, dim / 2, 2] of :func:`sgling_kernel.rotary.rope_table`; ``dim`` leading dimensions are rotated.
        neox: half-split pairs (i, i + dim / 2); else interleaved (2i, 2i + 1).
    """

    positions: Tensor
    table: Tensor
    neox: bool

    def turn(self, x: Tensor) -> Tensor:
        """x [N, heads, D] with its leading dimensions rotated, same dtype."""
        dim, rotate = 2 * self.table.shape[1], apply_rope_neox if self.neox else apply_rope
        turned = rotate(x[..., :dim].contiguous(), self.positions, self.table)
        return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), dim=-1)


def prepare_heads(
    x: Tensor, norms: tuple[Tensor, Tensor, float], rotary: RowRotary, cache: tuple[Tensor, Tensor]
) -> Tensor:
    """Normalise and rotate query and key heads; store the rows' keys and values in the caches of L layers.

    Args:
        x: [N, L, heads * D], per layer ``[query heads | key heads | value heads]``; as many keys as values.
        norms: (weight [D] of the query heads, weights [L, D] of the key heads, eps).
        cache: (caches [L, slots, 2 * KVH * D] with rows ``[key heads | value heads]``, int64 [N] slots of the rows;
            slot 0 drops a row).

    Returns:
        Queries [N, L * H, D] in x.dtype, H = 0 where x holds keys and values only. The norm is rounded to x.dtype
        before the rotation (docs/dspark.md §1.1).
    """
    (weight_q, weight_k, eps), (buffer, loc) = norms, cache
    rows, layers, dim = x.shape[0], x.shape[1], weight_k.shape[1]
    own = buffer.shape[-1] // dim
    heads = x.unflatten(-1, (-1, dim))
    queries, keys, values = heads.split((heads.shape[2] - own, own // 2, own // 2), dim=2)
    keys = rotary.turn(rms_norm(keys, weight_k.unsqueeze(1), eps).flatten(1, 2)).view(rows, layers, -1)
    buffer.index_copy_(1, loc, torch.cat((keys, values.flatten(2)), dim=-1).transpose(0, 1))
    return (
        rotary.turn(rms_norm(queries.flatten(1, 2), weight_q, eps)) if queries.shape[2] else x.new_empty(rows, 0, dim)
    )


def prepare_latent(
    pe: Tensor, latent: Tensor, norm: tuple[Tensor, float], rotary: RowRotary, cache: tuple[Tensor, Tensor]
) -> Tensor:
    """Rotate query and key parts, normalise latents; store the rows' entries in the caches of L layers.

    Args:
        pe: [N, L, H + 1, rope], query heads and the key of each layer, unrotated (H = 0: keys only).
        latent: [N, L, latent].
        norm: (weights [L, latent], eps).
        cache: (caches [L, slots, latent + rope] with rows ``[latent | rotated key]``, int64 [N] slots, 0 drops a row).

    Returns:
        Rotated queries [N, L * H, rope] in pe.dtype.
    """
    (weight, eps), (buffer, loc) = norm, cache
    rows, layers, _, rope = pe.shape
    turned = rotary.turn(pe.flatten(1, 2)).view(rows, layers, -1, rope)
    entries = torch.cat((rms_norm(latent, weight, eps), turned[:, :, -1]), dim=-1)
    buffer.index_copy_(1, loc, entries.transpose(0, 1))
    return turned[:, :, :-1].flatten(1, 2)
