"""Gumbel noise keyed by (seed, position, token): the only source of randomness of sampling."""

from sgling_kernel.noise.reference import gumbel_noise, uniform_noise

__all__ = ["gumbel_noise", "uniform_noise"]
