"""The Gumbel noise of reference.py as a Triton function, for kernels that draw while they hold the logits."""

import triton
import triton.language as tl

from sgling_kernel.noise import reference
from sgling_kernel.noise.kernel import mix64, unit_draw

_GOLDEN = tl.constexpr(reference._GOLDEN)


@triton.jit
def gumbel(seed, position, token):
    """reference.gumbel_noise of int32 token ids under int64 scalars, up to the rounding of the logarithms."""
    u = unit_draw(mix64(mix64(seed + _GOLDEN) + position * _GOLDEN), token)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))  # -log(1 - u) where 1 - u would lose the bits of u
    return -tl.log(tl.where(u < 0.01, series, -tl.log(1.0 - u)))
