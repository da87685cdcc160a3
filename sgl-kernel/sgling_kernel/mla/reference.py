"""Multi-head latent attention, plain torch (docs/ling3.md §3.2): the specification.

A cache row is [latent | rotated k_pe]; the latent is normalised before it gets here. Head dimension second.
"""

import torch
from torch import Tensor

from sgling_kernel.linear.fixed_rows import in_row_blocks
from sgling_kernel.mla.context import PagedContext
from sgling_kernel.norm.reference import rms_norm
from sgling_kernel.pointwise import sigmoid
from sgling_kernel.rotary import apply_rope


def write_kv(kv_pool: Tensor, loc: Tensor, c: Tensor, k_pe: Tensor) -> None:
    """Store row n of [c | k_pe] at slot loc[n], in place.

    kv_pool [slots, latent + rope], loc int64 [N], c [N, latent], k_pe [N, rope], all in the pool's dtype. Only the
    dummy slot 0 may occur more than once.
    """
    kv_pool.index_copy_(0, loc, torch.cat((c, k_pe), dim=-1))


def prepare(
    pe: Tensor, latent: Tensor, norm: tuple[Tensor, float], rotary: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
) -> Tensor:
    """Everything between the input projection and attention, except the absorbed query.

    pe [N, H + 1, rope] = unrotated queries and, last, the key; latent [N, latent]; norm = (weight, eps) of the latent;
    rotary = (positions int64 [N], table); cache = (kv_pool, loc), see ``write_kv`` -> rotated queries [N, H, rope].
    """
    turned = apply_rope(pe, *rotary)
    write_kv(*cache, rms_norm(latent, *norm), turned[:, -1])
    return turned[:, :-1]


def absorb_q(q_nope: Tensor, w_kc: Tensor) -> Tensor:
    """Project queries into the latent: q_nope [N, H, nope], w_kc [H, nope, latent] -> [N, H, latent], one rounding."""
    return _per_head(q_nope, w_kc)


def expand_v(lat: Tensor, w_vc: Tensor) -> Tensor:
    """Project attended latents to values: lat [N, H, latent], w_vc [H, latent, v] -> [N, H, v], one rounding."""
    return _per_head(lat, w_vc)


def _per_head(x: Tensor, w: Tensor) -> Tensor:
    """x [N, H, i] times w [H, i, o] head by head -> [N, H, o]; fixed-row mode applies."""
    return in_row_blocks(lambda rows: torch.bmm(rows.transpose(0, 1), w).transpose(0, 1), x)


def head_gate(o: Tensor, gate_logits: Tensor) -> Tensor:
    """Scale each head by its sigmoid gate: o [N, H, v], gate_logits [N, H] -> [N, H * v] in o.dtype.

    The gate is rounded to o.dtype before the product, which rounds again (docs/ling3.md §3.2).
    """
    gate = sigmoid(gate_logits.float()).to(o.dtype)
    return (o * gate[..., None]).flatten(1)


def mla_prefill(q: Tensor, kv: Tensor, w_kc: Tensor, w_vc: Tensor, prefix_len: int, scale: float) -> Tensor:
    """Causal attention of one request's chunk in the expanded form, all at once.

    q [T, H, nope + rope] (rope part rotated), kv [P + T, latent + rope] in position order, w_kc [H, nope, latent],
    w_vc [H, latent, v], P = prefix_len -> [T, H, v] in q.dtype. Keys and values are rounded to the model dtype, as the
    rows of kv_b_proj would be; scores, softmax and sum in fp32. Memory O(H * T * (P + T)).
    """
    latent = w_kc.shape[-1]
    k_nope = torch.einsum("lc,hnc->hln", kv[:, :latent], w_kc).float()
    value = torch.einsum("lc,hcv->hlv", kv[:, :latent], w_vc).float()
    q_nope, q_pe = q.float().split((w_kc.shape[1], kv.shape[1] - latent), dim=-1)
    scores = torch.einsum("thn,hln->htl", q_nope, k_nope) + torch.einsum("thr,lr->htl", q_pe, kv[:, latent:].float())
    position = torch.arange(kv.shape[0], device=q.device)
    hidden = position > position[prefix_len:, None]
    probs = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htl,hlv->thv", probs, value).to(q.dtype)


def mla_decode(q_lat: Tensor, q_pe: Tensor, kv_pool: Tensor, ctx: PagedContext, scale: float) -> Tensor:
    """Attention of bs * width rows over the paged latent cache in the absorbed form.

    q_lat [N, H, latent], q_pe [N, H, rope], kv_pool [slots, latent + rope] already holding the rows' own entries ->
    [N, H, latent] in q_lat.dtype; scores, softmax and sum in fp32, one rounding. Positions a row does not see have no
    influence, not even as NaN: scores and values are selected, not multiplied by zero.
    """
    bs, width, latent = ctx.seq_lens.shape[0], ctx.width, q_lat.shape[-1]
    kv = kv_pool[ctx.slots()].float()
    query = torch.cat((q_lat, q_pe), dim=-1).float().unflatten(0, (bs, width))
    visible = torch.arange(kv.shape[1], device=kv.device) <= ctx.last_visible()[..., None]
    scores = torch.einsum("bwhd,bld->bwhl", query, kv) * scale
    probs = torch.where(visible[:, :, None], scores, -torch.inf).softmax(-1)
    value = torch.where(visible[..., None], kv[:, None, :, :latent], 0.0)
    return torch.einsum("bwhl,bwlc->bwhc", probs, value).flatten(0, 1).to(q_lat.dtype)
