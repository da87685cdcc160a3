"""The trainable BailingMoeV3 model of the embedded checkpoint: trunk and NEXTN layer over flat token streams.

Linear weights that are used together are stacked in one parameter; ``export.py`` gives them their public names. Master
weights are fp32; activations take ``Pico.dtype`` (bf16 on a GPU). Experts are computed densely with a mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from sgling.srt.config.model_config import ModelConfig

from . import ops
from .ops import Layout, Router, compiled, linear, rms_norm


def matrix(*shape: int, std: float | None = None) -> nn.Parameter:
    """A normal-initialised weight; by default std = 1/sqrt(fan in)."""
    return nn.Parameter(torch.randn(*shape) * (shape[-1] ** -0.5 if std is None else std))


@compiled
def kda_inputs(x, norm, eps, weights, beta_weight, conv, positions, heads):
    """Input norm, stacked projections, short convolution: -> q, k, v, f [N, H, K], z [N, H*K], beta fp32 [N, H]."""
    h = rms_norm(x, norm, eps)
    width = weights.shape[1]
    mixed = linear(h, weights.flatten(0, 1))
    qkv, f, z = mixed.split((3 * width, width, width), dim=-1)
    qkv = ops.short_conv(qkv, conv, positions)
    q, k, v = (part.reshape(part.shape[0], heads, -1).contiguous() for part in qkv.chunk(3, dim=-1))
    return q, k, v, f.reshape(f.shape[0], heads, -1).contiguous(), z, torch.sigmoid(linear(h, beta_weight).float())


@compiled
def kda_outputs(x, o, z, norm, eps, weight):
    """Gated per-head norm, output projection, residual."""
    wide = o.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
    gated = (normed.flatten(1) * torch.sigmoid(z.float())).to(x.dtype)
    return x + linear(gated, weight)


class KDA(nn.Module):
    """Kimi Delta Attention with its input norm and residual (docs/ling3.md §3.1)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, self.heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
        width = self.heads * size
        self.eps, self.bound = config.rms_norm_eps, config.kda_lower_bound
        self.input_norm = nn.Parameter(torch.ones(d))
        self.qkvfg = matrix(5, width, d)
        self.beta = matrix(self.heads, d)
        self.conv = nn.Parameter((torch.rand(3 * width, config.short_conv_kernel_size) - 0.5) * 0.6)
        share = torch.exp(torch.empty(width).uniform_(math.log(1e-3), 0.0)) / -self.bound
        self.dt_bias = nn.Parameter(torch.log(share / (1 - share)))
        self.a_log = nn.Parameter(torch.empty(self.heads).uniform_(0.0, 0.3))
        self.o_norm = nn.Parameter(torch.ones(size))
        self.o_proj = matrix(d, width, std=0.02)

    def forward(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        q, k, v, f, z, beta = kda_inputs(
            x, self.input_norm, self.eps, self.qkvfg, self.beta, self.conv, layout.positions, self.heads
        )
        if x.is_cuda:
            o = ops.kda_chunked(q, k, v, f, beta.to(x.dtype), (self.a_log, self.dt_bias, self.bound), layout)
        else:
            g = ops.log_decay(f, self.a_log, self.dt_bias, self.bound)
            o = ops.kda_recurrence(q, k, v, g, beta, layout.positions).to(x.dtype)
        return kda_outputs(x, o, z, self.o_norm, self.eps, self.o_proj)


class MLASizes(NamedTuple):
    """Head sizes of one MLA layer."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    theta: float


@compiled
def mla_inputs(x, weights, eps, positions, sizes):
    """Input norm and projections: -> q, k [N, H, nope+rope], v [N, H, value], gate logits [N, H]."""
    norm, q_proj, kv_a, kv_norm, kv_b, gate = weights
    h = rms_norm(x, norm, eps)
    count = h.shape[0]
    q = linear(h, q_proj).reshape(count, sizes.heads, sizes.nope + sizes.rope)
    q_nope, q_pe = q.split((sizes.nope, sizes.rope), dim=-1)
    latent, k_pe = linear(h, kv_a).split((sizes.latent, sizes.rope), dim=-1)
    kv = linear(rms_norm(latent, kv_norm, eps), kv_b).reshape(count, sizes.heads, sizes.nope + sizes.value)
    k_nope, v = kv.split((sizes.nope, sizes.value), dim=-1)
    k_pe = ops.rope(k_pe.unsqueeze(1), positions, sizes.theta).expand(-1, sizes.heads, -1)
    q = torch.cat((q_nope, ops.rope(q_pe, positions, sizes.theta)), dim=-1)
    return q, torch.cat((k_nope, k_pe), dim=-1), v.contiguous(), linear(h, gate)


@compiled
def mla_outputs(x, o, gate, weight):
    """Head gate, output projection, residual."""
    gated = o * torch.sigmoid(gate.float()).to(o.dtype).unsqueeze(-1)
    return x + linear(gated.flatten(1), weight)


class MLA(nn.Module):
    """Gated multi-head latent attention, expanded form, with its input norm and residual (docs/ling3.md §3.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.eps = config.rms_norm_eps
        self.sizes = MLASizes(
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
            config.rope_theta,
        )
        heads, nope, pe, value, latent, _ = self.sizes
        self.input_norm = nn.Parameter(torch.ones(d))
        self.q_proj = matrix(heads * (nope + pe), d)
        self.kv_a = matrix(latent + pe, d)
        self.kv_norm = nn.Parameter(torch.ones(latent))
        self.kv_b = matrix(heads * (nope + value), latent)
        self.gate = matrix(heads, d, std=0.02)
        self.dense = matrix(d, heads * value, std=0.02)

    def inputs(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = (self.input_norm, self.q_proj, self.kv_a, self.kv_norm, self.kv_b, self.gate)
        return mla_inputs(x, weights, self.eps, positions, self.sizes)

    def forward(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        q, k, v, gate = self.inputs(x, layout.positions)
        return mla_outputs(x, ops.attention(q, k, v, layout), gate, self.dense)


@compiled
def dense_block(x, norm, eps, gate, up, down):
    """Norm, SwiGLU feed-forward, residual."""
    h = rms_norm(x, norm, eps)
    return x + linear(ops.swiglu(linear(h, gate), linear(h, up), None), down)


@compiled
def moe_block(x, norm, eps, selection, experts, shared, router, limits):
    """Norm, routed experts (dense with a mask), shared expert, residual: -> (x, chosen count per expert [E])."""
    h = rms_norm(x, norm, eps)
    router_weight, bias = selection
    weights = ops.route(torch.nn.functional.linear(h.float(), router_weight.to(h.dtype).float()), bias, router)
    gate, up, down = experts
    count, width = gate.shape[0], gate.shape[1]
    hidden = ops.swiglu(linear(h, gate.flatten(0, 1)), linear(h, up.flatten(0, 1)), limits[0])
    hidden = (hidden.unflatten(-1, (count, width)) * weights.to(h.dtype).unsqueeze(-1)).flatten(-2)
    routed = linear(hidden, down.permute(1, 0, 2).flatten(1))
    always = linear(ops.swiglu(linear(h, shared[0]), linear(h, shared[1]), limits[1]), shared[2])
    return x + routed + always, (weights.detach() > 0).float().sum(0)


class DenseFFN(nn.Module):
    """The dense feed-forward of the first layers, with its norm and residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, width = config.hidden_size, config.intermediate_size
        self.eps = config.rms_norm_eps
        self.post_norm = nn.Parameter(torch.ones(d))
        self.gate, self.up, self.down = matrix(width, d), matrix(width, d), matrix(d, width, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dense_block(x, self.post_norm, self.eps, self.gate, self.up, self.down)


class MoE(nn.Module):
    """Mixture of experts with its norm and residual. ``expert_bias`` follows the load, not the gradient (aux-free)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        d, width, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        shared = config.moe_shared_expert_intermediate_size
        self.eps = config.rms_norm_eps
        self.router = Router(
            config.n_group, config.topk_group, config.num_experts_per_tok, config.routed_scaling_factor
        )
        self.limits = (config.routed_limit(layer), config.shared_limit(layer))
        self.post_norm = nn.Parameter(torch.ones(d))
        self.router_weight = matrix(count, d)
        self.register_buffer("expert_bias", torch.zeros(count))
        self.register_buffer("load", torch.zeros(count), persistent=False)
        self.gate, self.up, self.down = (
            matrix(count, width, d),
            matrix(count, width, d),
            matrix(count, d, width, std=0.02),
        )
        self.shared_gate, self.shared_up, self.shared_down = (
            matrix(shared, d),
            matrix(shared, d),
            matrix(d, shared, std=0.02),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, chosen = moe_block(
            x,
            self.post_norm,
            self.eps,
            (self.router_weight, self.expert_bias),
            (self.gate, self.up, self.down),
            (self.shared_gate, self.shared_up, self.shared_down),
            self.router,
            self.limits,
        )
        if self.training:
            self.load += chosen
        return x

    def update_bias(self, rate: float) -> torch.Tensor:
        """Moves the selection bias toward even load; returns max load / mean load of the steps since the last call."""
        mean = self.load.mean().clamp(min=1e-6)
        self.expert_bias += rate * torch.sign(mean - self.load)
        self.expert_bias -= self.expert_bias.mean()
        ratio = self.load.max() / mean
        self.load.zero_()
        return ratio


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention = MLA(config) if config.is_mla(index) else KDA(config)
        self.ffn = MoE(config, index) if config.is_moe(index) else DenseFFN(config)

    def forward(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        return self.ffn(self.attention(x, layout))


@compiled
def join_halves(embedded, hidden, enorm, hnorm, eps, weight):
    """eh_proj of the normed pair, embedding half first (docs/ling3.md §3.6)."""
    return linear(torch.cat((rms_norm(embedded, enorm, eps), rms_norm(hidden, hnorm, eps)), dim=-1), weight)


class NextN(nn.Module):
    """The NEXTN layer: embedding of token p+1 and trunk hidden of position p -> hidden that predicts token p+2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.eps = config.rms_norm_eps
        self.enorm, self.hnorm, self.final_norm = (nn.Parameter(torch.ones(d)) for _ in range(3))
        self.eh_proj = matrix(d, 2 * d)
        self.layer = Layer(config, config.nextn_layer_id)

    def joined(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return join_halves(embedded, hidden, self.enorm, self.hnorm, self.eps, self.eh_proj)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
        return rms_norm(self.layer(self.joined(embedded, hidden), layout), self.final_norm, self.eps)


class Pico(nn.Module):
    """Trunk, head and NEXTN layer."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = matrix(config.vocab_size, config.hidden_size, std=0.05)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = matrix(config.vocab_size, config.hidden_size, std=0.02)
        self.nextn = NextN(config)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self.embedding).to(self.dtype)

    def trunk(self, tokens: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Tokens [N] -> hidden [N, d] after ``model.norm``, the vector fed to the head and to ``hnorm``."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, layout)
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def draft(self, tokens: torch.Tensor, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
        """NEXTN hidden of every position p from token p+1 and hidden p (the stream's last one wraps, never scored)."""
        return self.nextn(self.embed(tokens.roll(-1)), hidden, layout)

    def moe_layers(self) -> list[MoE]:
        """All MoE modules, trunk first."""
        return [module for module in self.modules() if isinstance(module, MoE)]
