"""The noise of reference.py in Triton: the same uniform bits (integer arithmetic), logarithms but for the last bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgling_kernel.pdl import launch_pdl, pdl_trigger, pdl_wait

BLOCK = 1024


@triton.jit
def mix64(x):
    """reference._mix64 of int64 values."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def position_key(seed_key, position):
    """int64 key of a row from reference.seed_key's value and its position."""
    return mix64(seed_key + position * -0x61C8864680B583EB)


@triton.jit
def row_key(seed, position):
    """int64 key of a row from its request's seed and its position."""
    return position_key(mix64(seed + -0x61C8864680B583EB), position)


@triton.jit
def unit_draw(key, token):
    """reference.uniform_noise of int32 token ids under the int64 key of their row."""
    x = token ^ key.to(tl.int32)
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x += (key >> 32).to(tl.int32)
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    x = x ^ ((x >> 16) & 0xFFFF)
    return tl.minimum(((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)


@triton.jit
def gumbel(u):
    """-log(-log(1 - u)); the inner logarithm is corrected for the rounding of 1 - u, so small u keep their digits."""
    rest = 1.0 - u
    inexact = rest != 1.0
    inner = tl.where(inexact, tl.log(rest) * (u / tl.where(inexact, 1.0 - rest, 1.0)), -u)
    return -tl.log(-inner)


@triton.jit
def _noise_kernel(
    seed, position, out, start, V: tl.constexpr, GUMBEL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_trigger(PDL)
    noise = unit_draw(row_key(tl.load(seed + row), tl.load(position + row)), start + col)
    tl.store(out + row * V + col, gumbel(noise) if GUMBEL else noise, mask=col < V)


def noise(seed: Tensor, position: Tensor, vocab_start: int, vocab_size: int, is_gumbel: bool) -> Tensor:
    """reference.gumbel_noise or reference.uniform_noise in one node."""
    seed, position = seed.contiguous(), position.contiguous()
    out = torch.empty(seed.shape[0], vocab_size, dtype=torch.float32, device=seed.device)
    _noise_kernel[(seed.shape[0], triton.cdiv(vocab_size, BLOCK))](
        seed, position, out, vocab_start, V=vocab_size, GUMBEL=is_gumbel, BLOCK=BLOCK, num_warps=4, **launch_pdl(seed)
    )
    return out
