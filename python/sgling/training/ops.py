"""Differentiable pieces of the training forward, on flat token streams with document boundaries.

Shapes: N tokens, H heads, K head size, d hidden size. Each function is pure; ``compiled`` wraps the pointwise-heavy
ones on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Layout(NamedTuple):
    """Where documents lie in a flat stream: positions and document ids int64 [N], bounds [D+1] in three forms."""

    positions: torch.Tensor
    documents: torch.Tensor
    bounds: torch.Tensor
    bounds_long: torch.Tensor
    bounds_cpu: torch.Tensor
    longest: int


def make_layout(starts: list[int], length: int, device: torch.device | str) -> Layout:
    """Layout from document start offsets (the first is 0)."""
    bounds = torch.tensor([*starts, length], dtype=torch.int64)
    sizes = bounds[1:] - bounds[:-1]
    documents = torch.repeat_interleave(torch.arange(len(starts)), sizes)
    positions = torch.arange(length) - bounds[:-1][documents]
    longest = int(sizes.max())
    return Layout(
        positions.to(device), documents.to(device), bounds.to(device, torch.int32), bounds.to(device), bounds, longest
    )


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [..., K]`` times fp32 master weight ``[O, K]`` rounded to the activation dtype."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in fp32 with one rounding to ``x.dtype``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def short_conv(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Causal depth-wise convolution, width 4, then SiLU; taps never reach back over a document start.

    x [N, C], weight [C, 4] (tap 3 is the current token); fp32 until one rounding.
    """
    taps = weight.shape[1]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap in range(taps):
        back = taps - 1 - tap
        moved = F.pad(x, (0, 0, back, 0))[: x.shape[0]] if back else x
        moved = torch.where((positions >= back)[:, None], moved, 0)
        total = total + moved.float() * weight[:, tap].float()
    return F.silu(total).to(x.dtype)


def log_decay(f: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, bound: float) -> torch.Tensor:
    """Per-channel log decay in (bound, 0): f [..., H, K] -> fp32 (docs/ling3.md §3.1)."""
    return bound * torch.sigmoid(a_log.exp()[:, None] * (f.float() + dt_bias.view(f.shape[-2:])))


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def kda_recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Delta rule token by token, state reset at document starts: q, k, v, g [N, H, K], beta [N, H]. Slow."""
    scale = q.shape[-1] ** -0.5
    q, k, v, decay = l2_normalize(q) * scale, l2_normalize(k), v.float(), g.exp()
    state = torch.zeros(*q.shape[1:], v.shape[-1], dtype=torch.float32, device=q.device)
    keep = (positions > 0).float()
    outputs = []
    for t in range(q.shape[0]):
        state = state * keep[t] * decay[t].unsqueeze(-1)
        update = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs)


def kda_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    f: torch.Tensor,
    beta: torch.Tensor,
    gate: tuple[torch.Tensor, torch.Tensor, float],
    layout: Layout,
) -> torch.Tensor:
    """The same on a GPU in chunks (fla-core); ``gate`` is (A_log, dt_bias, lower bound), applied inside the kernel."""
    from fla.ops.kda import chunk_kda

    a_log, dt_bias, bound = gate
    out, _ = chunk_kda(
        q=q[None],
        k=k[None],
        v=v[None],
        g=f[None],
        beta=beta[None],
        A_log=a_log,
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        safe_gate=True,
        lower_bound=bound,
        cu_seqlens=layout.bounds_long,
        cu_seqlens_cpu=layout.bounds_cpu,
        disable_recompute=True,
    )
    return out[0]


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Interleaved rotary embedding of ``x [N, H, R]`` at integer positions [N], fp32 inside."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[:, None] * rates
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.float().unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Causal softmax attention within documents: q, k [N, H, D], v [N, H, V] -> [N, H, V]."""
    scale = q.shape[-1] ** -0.5
    if q.is_cuda:
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        out = torch.ops.aten._flash_attention_forward(
            q, k, padded, layout.bounds, layout.bounds, layout.longest, layout.longest, 0.0, True, False, scale=scale
        )[0]
        return out[..., : v.shape[-1]]
    same = layout.documents[:, None] == layout.documents[None]
    mask = same & torch.ones_like(same).tril()
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhv->nhv", weights, v.float()).to(v.dtype)


class Router(NamedTuple):
    """Router sizes (docs/ling3.md §3.3)."""

    n_group: int
    topk_group: int
    top_k: int
    scaling: float


def route(logits: torch.Tensor, bias: torch.Tensor, router: Router) -> torch.Tensor:
    """Dense expert weights fp32 [N, E] (zero for experts not chosen), differentiable in the chosen scores."""
    scores = torch.sigmoid(logits)
    choice = (scores + bias).detach().unflatten(-1, (router.n_group, -1))
    group_score = choice.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(group_score).scatter(-1, group_score.topk(router.topk_group, dim=-1).indices, 1.0)
    masked = choice.masked_fill(kept.unsqueeze(-1) == 0, float("-inf")).flatten(-2)
    chosen = torch.zeros_like(scores).scatter(-1, masked.topk(router.top_k, dim=-1).indices, 1.0)
    weights = scores * chosen
    return router.scaling * weights / (weights.sum(-1, keepdim=True) + 1e-20)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(gate) * up, clamped after SiLU (docs/ling3.md §3.4); fp32 inside, one rounding."""
    activated, wide = F.silu(gate.float()), up.float()
    if limit is not None:
        activated, wide = activated.clamp(max=limit), wide.clamp(-limit, limit)
    return (activated * wide).to(gate.dtype)


_USE_COMPILE = False


def use_compile(enabled: bool) -> None:
    """Switches ``compiled`` functions to torch.compile (GPU runs)."""
    global _USE_COMPILE
    _USE_COMPILE = enabled


@contextmanager
def eager() -> Iterator[None]:
    """Runs ``compiled`` functions plainly for a while: shapes that are met once are not worth a compilation."""
    before = _USE_COMPILE
    use_compile(False)
    try:
        yield
    finally:
        use_compile(before)


def compiled(function: Callable) -> Callable:
    """Decorator: runs ``function`` through torch.compile when enabled, plainly otherwise."""
    fast = None

    def call(*args: object) -> object:
        nonlocal fast
        if not _USE_COMPILE:
            return function(*args)
        if fast is None:
            torch._dynamo.config.cache_size_limit = 64
            fast = torch.compile(function, dynamic=False)
        return fast(*args)

    return call
