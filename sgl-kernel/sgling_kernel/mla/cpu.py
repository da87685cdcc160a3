"""Latent attention for serving on a CPU: decode in fixed splits, prefill in query blocks.

Tested equal to the reference. Other devices use it too until they have a kernel: nothing here reads a device value.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from sgling_kernel.linear.fixed_rows import fixed_row_count
from sgling_kernel.mla.context import PagedContext

SPLIT = 256  # positions per split; part of the numerics: changing it changes the last bits of every decode
_POSITIONS_AT_ONCE = 16384  # gathered cache rows per pass, so that they stay within a few MB
_QUERY_BLOCK = 256
_LOWEST = torch.finfo(torch.float32).min


def mla_decode(q_lat: Tensor, q_pe: Tensor, kv_pool: Tensor, ctx: PagedContext, scale: float) -> Tensor:
    """reference.mla_decode, with every request's positions cut into splits of SPLIT and combined in order.

    A split that a row does not see adds an exact zero, so kv_bound changes no bit. In fixed-row mode every row is
    attended on its own, so neither width nor bs does; otherwise the rows of a request share one product.
    """
    bs, width, heads = ctx.seq_lens.shape[0], ctx.width, q_lat.shape[1]
    query = torch.cat((q_lat, q_pe), dim=-1).float().mul_(scale).view(bs, width, heads, -1)
    slots, last = ctx.slots(), ctx.last_visible()
    if slots.shape[1] % SPLIT:
        slots = F.pad(slots, (0, -slots.shape[1] % SPLIT))
    if fixed_row_count() is not None:
        query, last = query.view(bs * width, 1, heads, -1), last.view(bs * width, 1)
        slots = slots.repeat_interleave(width, dim=0)
    at_once = max(1, _POSITIONS_AT_ONCE // slots.shape[1])
    if query.shape[0] <= at_once:
        return _attend(query, kv_pool, slots, last, q_lat.shape[-1]).view(bs * width, heads, -1).to(q_lat.dtype)
    groups = zip(query.split(at_once), slots.split(at_once), last.split(at_once), strict=True)
    out = [_attend(q, kv_pool, slot, bound, q_lat.shape[-1]) for q, slot, bound in groups]
    return torch.cat(out).view(bs * width, heads, -1).to(q_lat.dtype)


def _attend(query: Tensor, kv_pool: Tensor, slots: Tensor, last: Tensor, latent: int) -> Tensor:
    """Attend G groups of W rows over L positions each.

    query fp32 [G, W, H, D] already scaled, slots int64 [G, L], last visible position int64 [G, W]
    -> fp32 [G, W * H, latent].

    Values that are not finite count as zero: a row that sees one has a NaN score already, and one that does not is
    left alone by it.
    """
    groups, width, heads, dim = query.shape
    splits, rows = slots.shape[1] // SPLIT, width * heads
    kv = kv_pool.index_select(0, slots.view(-1)).float().view(groups * splits, SPLIT, dim)
    per_split = query.view(groups, 1, rows, dim).expand(-1, splits, -1, -1).reshape(groups * splits, rows, dim)
    scores = torch.bmm(per_split, kv.transpose(1, 2)).view(groups, splits, width, heads, SPLIT)
    position = torch.arange(splits * SPLIT, device=query.device).view(splits, 1, 1, SPLIT)
    scores.masked_fill_(position > last.view(groups, 1, width, 1, 1), -torch.inf)
    scores = scores.view(groups, splits, rows, SPLIT)
    split_max = scores.amax(-1, keepdim=True)
    probs = scores.sub_(split_max.clamp(min=_LOWEST)).exp_()
    value = kv.nan_to_num_(0.0, 0.0, 0.0)[..., :latent]
    split_out = torch.bmm(probs.view(groups * splits, rows, SPLIT), value).view(groups, splits, rows, latent)
    split_sum = probs.sum(-1, keepdim=True)
    if splits == 1:  # the weight of a lone split is 1
        return (split_out / split_sum).squeeze(1)
    weight = (split_max - split_max.amax(1, keepdim=True)).exp_()
    return _ordered_sum(split_out.mul_(weight)) / _ordered_sum(split_sum.mul_(weight))


def _ordered_sum(x: Tensor) -> Tensor:
    """Sum over dimension 1 in index order, so that trailing zeros change no bit (torch.sum regroups by length)."""
    return x.cumsum(1)[:, -1]


def mla_prefill(q: Tensor, kv: Tensor, w_kc: Tensor, w_vc: Tensor, prefix_len: int, scale: float) -> Tensor:
    """reference.mla_prefill in blocks of query rows: memory O(H * (P + T) * head size), not O(H * T * (P + T)).

    Values are padded with zero columns to the key size, because torch's flash attention takes equal sizes only.
    """
    latent, heads, v_dim = w_kc.shape[-1], w_kc.shape[0], w_vc.shape[-1]
    k_nope = torch.matmul(kv[:, :latent], w_kc.transpose(1, 2))
    key = torch.cat((k_nope, kv[:, latent:].expand(heads, -1, -1)), dim=-1)[None]
    value = torch.matmul(kv[:, :latent], w_vc)[None]
    value = F.pad(value, (0, max(0, key.shape[-1] - v_dim)))
    position = torch.arange(kv.shape[0], device=q.device)
    out = []
    for rows in q.split(_QUERY_BLOCK):
        start = prefix_len + _QUERY_BLOCK * len(out)
        end = start + rows.shape[0]
        seen = position[:end] <= position[start:end, None]
        query = rows.transpose(0, 1)[None]
        block = F.scaled_dot_product_attention(query, key[:, :, :end], value[:, :, :end], attn_mask=seen, scale=scale)
        out.append(block[0, :, :, :v_dim].transpose(0, 1))
    return torch.cat(out)
