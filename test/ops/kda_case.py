"""Random KDA layers, pools and rows for the tests in this folder, and the round helpers they share."""

from typing import NamedTuple

import torch

from sgling_kernel.kda import (
    KDAParams,
    ReplayRing,
    StagedBuffers,
    commit_replay,
    commit_staged,
    kda_decode,
    kda_verify_replay,
    kda_verify_staged,
)

SCHEMES = ("staged", "replay")


class Rows(NamedTuple):
    """Projected rows of one layer: qkv [N, C], f [N, H·K], b [N, H]."""

    qkv: torch.Tensor
    f: torch.Tensor
    b: torch.Tensor

    def pick(self, index) -> "Rows":
        return Rows(*(t[index] for t in self))


class Pools(NamedTuple):
    """conv [Lk, S, 3, C] in the model dtype, state fp32 [Lk, S, H, V, K]."""

    conv: torch.Tensor
    state: torch.Tensor

    def clone(self) -> "Pools":
        return Pools(*(t.clone() for t in self))

    def layer(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv[i], self.state[i]


def make_params(heads, dim, bias=0.0, spread=1.0, dtype=torch.float32) -> KDAParams:
    """``bias`` moves the gates: large positive -> g near -5, large negative -> g near 0."""
    return KDAParams(
        conv_weight=(torch.randn(3 * heads * dim, 4) * 0.5).to(dtype),
        a_log=(torch.randn(heads) * 0.3).to(dtype),
        dt_bias=(torch.randn(heads, dim) * spread + bias).to(dtype),
        lower_bound=-5.0,
    )


def make_rows(count, heads, dim, dtype=torch.float32) -> Rows:
    return Rows(*(torch.randn(count, n).to(dtype) for n in (3 * heads * dim, heads * dim, heads)))


def make_pools(layers, slots, heads, dim, dtype=torch.float32) -> Pools:
    state = torch.randn(layers, slots, heads, dim, dim) * 0.3
    state[:, :, 0, 0, 0] = -0.0
    return Pools(torch.randn(layers, slots, 3, 3 * heads * dim).to(dtype), state)


def make_store(scheme, pools: Pools, width, ring=16, fill=float("nan")) -> StagedBuffers | ReplayRing:
    """A rollback store for all layers, filled with NaN unless told otherwise."""
    (layers, slots, _, channels), (heads, _, dim) = pools.conv.shape, pools.state.shape[2:]
    lead, dtype = (layers, slots), pools.conv.dtype
    if scheme == "staged":
        return StagedBuffers(
            torch.full((*lead, width, 3, channels), fill, dtype=dtype),
            torch.full((*lead, width, heads, dim, dim), fill),
        )
    head = (*lead, ring, heads, dim)
    return ReplayRing(
        torch.full((*lead, ring, channels), fill, dtype=dtype),
        torch.full(head, fill, dtype=dtype),
        torch.full(head, fill, dtype=dtype),
        torch.full(head, fill),
        torch.full(head[:-1], fill),
    )


def decode(layers, rows: list[Rows], pools: Pools, slots) -> torch.Tensor:
    """One decode step of every layer, in place -> o [Lk, bs, H, V]."""
    return torch.stack([kda_decode(*rows[i], p, *pools.layer(i), slots) for i, p in enumerate(layers)])


def verify(scheme, layers, rows: list[Rows], pools: Pools, slots, seq_lens, width, store) -> torch.Tensor:
    """One verify of every layer -> o [Lk, bs, W, H, V]."""
    outputs = []
    for i, p in enumerate(layers):
        own = type(store)(*(t[i] for t in store))
        if scheme == "staged":
            out = kda_verify_staged(*rows[i], p, *pools.layer(i), slots, width, own)
        else:
            out = kda_verify_replay(*rows[i], p, *pools.layer(i), slots, seq_lens, width, own)
        outputs.append(out.unflatten(0, (-1, width)))
    return torch.stack(outputs)


def commit(scheme, pools: Pools, store, slots, seq_lens, accept, width) -> None:
    if scheme == "staged":
        commit_staged(*pools, store, slots, accept)
    else:
        commit_replay(*pools, store, slots, seq_lens, accept, width)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: -0.0 differs from 0.0, equal NaNs are equal."""
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))
