"""Gumbel noise keyed by (seed, position, token): the only source of randomness of sampling."""

from torch import Tensor

from sgling_kernel import dispatch
from sgling_kernel.noise import reference
from sgling_kernel.noise.reference import seed_key

__all__ = ["gumbel_noise", "seed_key", "uniform_noise"]


def gumbel_noise(seed: Tensor, position: Tensor, vocab_start: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of every token of a vocabulary range; see reference.gumbel_noise."""
    if dispatch.use_triton(seed):
        from sgling_kernel.noise import kernel

        return kernel.noise(seed, position, vocab_start, vocab_size, is_gumbel=True)
    return reference.gumbel_noise(seed, position, vocab_start, vocab_size)


def uniform_noise(seed: Tensor, position: Tensor, vocab_start: int, vocab_size: int) -> Tensor:
    """Uniform noise of every token of a vocabulary range; see reference.uniform_noise."""
    if dispatch.use_triton(seed):
        from sgling_kernel.noise import kernel

        return kernel.noise(seed, position, vocab_start, vocab_size, is_gumbel=False)
    return reference.uniform_noise(seed, position, vocab_start, vocab_size)
