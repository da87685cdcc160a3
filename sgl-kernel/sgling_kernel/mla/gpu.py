"""Expanded latent attention of a prefill chunk on a GPU: library products and flash attention."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right


def mla_prefill(q: Tensor, kv: Tensor, w_kc: Tensor, w_vc: Tensor, prefix_len: int, scale: float) -> Tensor:
    """reference.mla_prefill; keys and values exist once per head, scores never do.

    Values are padded with zero columns to the key size: flash attention takes equal sizes only.
    """
    latent, heads, v_dim = w_kc.shape[-1], w_kc.shape[0], w_vc.shape[-1]
    k_nope = torch.matmul(kv[:, :latent], w_kc.transpose(1, 2))
    key = torch.cat((k_nope, kv[:, latent:].expand(heads, -1, -1)), dim=-1)[None]
    value = F.pad(torch.matmul(kv[:, :latent], w_vc), (0, max(0, key.shape[-1] - v_dim)))[None]
    query = q.transpose(0, 1)[None]
    if prefix_len:
        mask = causal_lower_right(q.shape[0], kv.shape[0])
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return out[0, :, :, :v_dim].transpose(0, 1)
