"""KDA prefill in chunk form: matrix products over 64-row chunks instead of one step per token.

Equations: docs/ling3.md §3.1 "Chunked prefill". Agrees with the recurrence to rounding, not bit for bit. Plain torch,
so it runs on any device; cost is linear in T and scratch memory is bounded by ``SEGMENT``.
"""

from typing import NamedTuple

import torch

from sgling_kernel.kda.params import KDAParams
from sgling_kernel.kda.recurrence import l2_normalize, row_inputs

CHUNK = 64
SUB = 16
SEGMENT = 8 * CHUNK  # rows whose chunk terms exist at once
MIN_LOG_DECAY = -40.0
MIN_LOWER_BOUND = -10.0  # SUB / 2 rows of decay must stay inside the fp32 exponent range


class ChunkTerms(NamedTuple):
    """State-independent part of NT chunks of C rows, [H, NT, ...] in the state dtype.

    Attributes:
        u: [.., C, V], T (β ⊙ V).
        wq: [.., 2C, K], T (β ⊙ K̂ ⊙ e^G) over Q̂ ⊙ e^G: both meet the entry state.
        b: [.., C, C] causal query-key scores with their decay.
        k_to_end: [.., C, K], K̂ ⊙ e^(G_C - G).
        decay: [.., 1, K], e^(G_C).
    """

    u: torch.Tensor
    wq: torch.Tensor
    b: torch.Tensor
    k_to_end: torch.Tensor
    decay: torch.Tensor


def kda_prefill(
    qkv: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    p: KDAParams,
    conv_window: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """T tokens of one request from (conv_window, state); splitting the prompt and carrying both over is equivalent.

    qkv [T, C], f [T, H·K], b [T, H], conv_window [3, C], state [H, V, K] (fp32; fp64 computes in fp64)
    -> (o [T, H, V] in the dtype of qkv, new window, new state); inputs are left as they are.
    Errors: ValueError for T = 0, and for a gate bound below ``MIN_LOWER_BOUND``.
    """
    if qkv.shape[0] == 0:
        raise ValueError("kda_prefill needs at least one token")
    if p.lower_bound < MIN_LOWER_BOUND:
        raise ValueError(f"lower_bound {p.lower_bound} < {MIN_LOWER_BOUND}: e^g would leave the fp32 range in a chunk")
    outputs = []
    for rows in zip(qkv.split(SEGMENT), f.split(SEGMENT), b.split(SEGMENT), strict=True):
        out, conv_window, state = _segment(*rows, p, conv_window, state)
        outputs.append(out)
    return torch.cat(outputs), conv_window, state


def _segment(
    qkv: torch.Tensor,
    f: torch.Tensor,
    b: torch.Tensor,
    p: KDAParams,
    window: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """At most ``SEGMENT`` tokens; arguments and results as ``kda_prefill``. Padding rows have β = g = 0: no effect."""
    tokens = qkv.shape[0]
    chunk = min(CHUNK, -(-tokens // SUB) * SUB)
    inputs = row_inputs(qkv, f, b, p, window.unsqueeze(0), state.dtype)
    q, k = l2_normalize(inputs.qkv[0, :, :2].to(state.dtype)).unbind(1)
    v = inputs.qkv[0, :, 2].to(state.dtype)
    operands = (q * q.shape[-1] ** -0.5, k, v, inputs.g[0], inputs.beta[0].unsqueeze(-1))
    terms = _chunk_terms(*(_to_chunks(t, chunk) for t in operands))
    out, state = _scan(terms, state)
    out = out.flatten(1, 2)[:, :tokens].transpose(0, 1)
    return out.to(qkv.dtype), inputs.rows[0, -3:].clone(), state


def _to_chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[T, H, D] -> [H, NT, chunk, D], zero rows at the end."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % chunk))
    return padded.unflatten(0, (-1, chunk)).permute(2, 0, 1, 3).contiguous()


def _chunk_terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkTerms:
    """Solve the intra-chunk delta rule; q (scaled), k, v, g [H, NT, C, K|V], beta [H, NT, C, 1]."""
    decay = g.double().cumsum(-2)  # fp64: later differences of nearby rows must not lose digits
    a, b = _decayed_scores(q, k, decay)
    last = decay[..., -1:, :]
    from_entry = _decay_factor(decay, g.dtype)
    rhs = torch.cat([v, k * from_entry], -1).mul_(beta)
    solved = torch.linalg.solve_triangular(a.mul_(beta), rhs, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    return ChunkTerms(
        u=u,
        wq=torch.cat([w, q * from_entry], -2),
        b=b,
        k_to_end=k * _decay_factor(last - decay, g.dtype),
        decay=from_entry[..., -1:, :],
    )


def _decay_factor(log_decay: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e^x of a log-decay x <= 0. Below e^-40, far under the resolution, it stays e^-40: subnormal numbers are slow."""
    return log_decay.clamp_min(MIN_LOG_DECAY).to(dtype).exp_()


def _decayed_scores(q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_c x_i[c] k_j[c] e^(G_i[c] - G_j[c]) for x = k (i > j) and x = q (i >= j), zero elsewhere: two [H, NT, C, C].

    The exponential is split into a row and a column factor, relative to a point between i and j: the later sub-chunk's
    start across sub-chunks (both factors <= 1), the middle row inside one (at most SUB / 2 rows of decay either way).
    """
    heads, chunks, chunk, dim = k.shape
    subs = chunk // SUB

    def by_sub(x: torch.Tensor) -> torch.Tensor:
        return x.view(heads, chunks, subs, SUB, dim)

    decay_sub, k_sub = by_sub(decay), by_sub(k)
    queries = torch.stack([k_sub, by_sub(q)])  # [2, H, NT, subs, SUB, K]
    middle = (decay_sub - decay_sub[..., SUB // 2 - 1 : SUB // 2, :]).to(k.dtype)
    inside = (queries * middle.exp()) @ (k_sub * middle.neg_().exp_()).mT
    scores = k.new_zeros(2, heads, chunks, subs, SUB, chunk)
    for later in range(subs):
        begin = later * SUB
        own = scores[:, :, :, later, :, begin : begin + SUB]
        own[0] = inside[0, :, :, later].tril(-1)
        own[1] = inside[1, :, :, later].tril()
        if later:
            start = decay[:, :, begin - 1 : begin]
            row = _decay_factor(decay_sub[:, :, later] - start, k.dtype)
            column = _decay_factor(start - decay[:, :, :begin], k.dtype)
            scores[:, :, :, later, :, :begin] = (queries[:, :, :, later] * row) @ (k[:, :, :begin] * column).mT
    a, b = scores.view(2, heads, chunks, chunk, chunk).unbind(0)
    return a, b


def _scan(terms: ChunkTerms, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry the state over the chunks: -> (o [H, NT, C, V], state after the last chunk); the input is left as it is."""
    chunk = terms.u.shape[-2]
    values, from_entry = [], []
    for u, wq, k_to_end, decay in zip(
        terms.u.unbind(1), terms.wq.unbind(1), terms.k_to_end.unbind(1), terms.decay.unbind(1), strict=True
    ):
        read = wq @ state.mT
        value = u - read[:, :chunk]
        state = torch.baddbmm(state * decay, value.mT, k_to_end)
        values.append(value)
        from_entry.append(read[:, chunk:])
    return torch.stack(from_entry, 1) + terms.b @ torch.stack(values, 1), state
