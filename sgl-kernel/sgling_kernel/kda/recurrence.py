"""Arithmetic shared by every KDA operator, so that decode, verify, commit and prefill round at the same places.

All of it is elementwise or a sum over the last, contiguous dim, never a matrix product: on any device and batch size a
row's bits depend on that row alone. Formulas: docs/ling3.md §3.1; rounding points: docs/numerics.md.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sgling_kernel.kda.params import KDAParams
from sgling_kernel.pointwise import sigmoid, silu

L2_EPS = 1e-6


class RowInputs(NamedTuple):
    """What each row feeds the recurrence, apart from the state. B requests, W rows each.

    Attributes:
        rows: [B, W+3, C] model dtype, stored window followed by the new pre-conv rows.
        qkv: [B, W, 3, H, K] model dtype, after conv, SiLU and rounding.
        g: [B, W, H, K] log-decay, state dtype.
        beta: [B, W, H] state dtype.
    """

    rows: torch.Tensor
    qkv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class StepInputs(NamedTuple):
    """Operands of W recurrence steps, broadcastable against the state [B, H, V, K]; state dtype.

    Attributes:
        k: [B, W, H, 1, K] l2-normalised.
        v: [B, W, H, V, 1].
        decay: [B, W, H, 1, K], e^g.
        beta: [B, W, H, 1, 1].
    """

    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def per_step(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """(k, v, decay, beta) of row 0, 1, ..., W-1."""
        return zip(self.k.unbind(1), self.v.unbind(1), self.decay.unbind(1), self.beta.unbind(1), strict=True)


def short_conv(rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Causal depth-wise conv of width 4 with SiLU: one stacked product, then taps summed oldest to newest.

    rows [B, W+3, C] model dtype, weight [C, 4] fp32 -> [B, W, C], computed in ``dtype``, rounded to the model dtype.
    """
    windows = rows.to(dtype).unfold(1, 4, 1)
    return silu((windows * weight).sum(-1)).to(rows.dtype)


def gates(f: torch.Tensor, b: torch.Tensor, p: KDAParams, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay g = lower_bound · σ(e^{+a_log} · (f + dt_bias)) and step size β = σ(b).

    f [N, H·K] and b [N, H] in the model dtype -> g [N, H·K], beta [N, H] in ``dtype``. One exponential for both.
    """
    heads, dim = p.dt_bias.shape
    scaled = (f.to(dtype).view(-1, heads, dim) + p.dt_bias).mul_(p.a_log.exp().unsqueeze(-1))
    both = sigmoid(torch.cat([scaled.view(-1, heads * dim), b.to(dtype)], 1))
    g, beta = both.split((heads * dim, heads), 1)
    return g * p.lower_bound, beta


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x · (Σx² + 1e-6)^(-1/2) over the last dim; ε is added to the sum, inside the root."""
    return x * (x * x).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()


def row_inputs(
    qkv: torch.Tensor, f: torch.Tensor, b: torch.Tensor, p: KDAParams, window: torch.Tensor, dtype: torch.dtype
) -> RowInputs:
    """Everything of W rows per request that does not depend on the recurrent state.

    qkv [B·W, C], f [B·W, H·K], b [B·W, H], window [B, 3, C], all model dtype; ``dtype`` is the state's.
    """
    batch, (heads, dim) = window.shape[0], p.dt_bias.shape
    rows = torch.cat([window, qkv.view(batch, -1, qkv.shape[-1])], 1)
    g, beta = gates(f, b, p, dtype)
    return RowInputs(
        rows=rows,
        qkv=short_conv(rows, p.conv_weight, dtype).view(batch, -1, 3, heads, dim),
        g=g.view(batch, -1, heads, dim),
        beta=beta.view(batch, -1, heads),
    )


def step_inputs(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> StepInputs:
    """Shape the operands of the recurrence: normalised k and v [B, W, H, K|V], log-decay g, beta [B, W, H]."""
    return StepInputs(k.unsqueeze(-2), v.unsqueeze(-1), g.exp().unsqueeze(-2), beta.unsqueeze(-1).unsqueeze(-1))


def delta_step(
    state: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    after: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """One token of the delta rule: S' = S·e^g; u = β(v − S' k̂); after = S' + u k̂ᵀ.

    The only place where this order is written down. state, after [B, H, V, K] (``after`` is written, ``state`` read);
    k, v, decay, beta are one step of ``StepInputs``; ``scratch`` is shaped like the state and holds junk afterwards.
    """
    torch.mul(state, decay, out=after)
    torch.mul(after, k, out=scratch)
    update = (v - torch.sum(scratch, -1, True)).mul_(beta)
    after.addcmul_(update, k)


def advance(state: torch.Tensor, steps: StepInputs) -> torch.Tensor:
    """States after each of the W rows, [B, W, H, V, K]; ``state`` [B, H, V, K] is left as it is."""
    states = state.new_empty(state.shape[0], steps.k.shape[1], *state.shape[1:])
    scratch = torch.empty_like(state)
    for after, operands in zip(states.unbind(1), steps.per_step(), strict=True):
        delta_step(state, *operands, after, scratch)
        state = after
    return states


def run_rows(state: torch.Tensor, inputs: RowInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the W rows of ``inputs`` from ``state`` [B, H, V, K]: (states [B, W, H, V, K], o = S q̂ [B, W, H, V]).

    q̂ is scaled by K^(-1/2) after the normalisation; row j reads the state after row j. o is not rounded yet.
    """
    dtype, dim = state.dtype, state.shape[-1]
    q, k = l2_normalize(inputs.qkv[:, :, :2].to(dtype)).unbind(2)
    states = advance(state, step_inputs(k, inputs.qkv[:, :, 2].to(dtype), inputs.g, inputs.beta))
    return states, (states * q.mul_(dim**-0.5).unsqueeze(-2)).sum(-1)
